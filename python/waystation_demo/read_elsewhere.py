"""Reads a checkpoint with the public safetensors package and with torch, and none of Waystation's code.

Run as a script, outside of any package. Prints one JSON object: for each reader the SHA-256 of every
array's bytes by name, or null for torch where it is not installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path


def with_safetensors(files: list[Path]) -> dict[str, str]:
    """Digests of the arrays as NumPy sees them."""
    from safetensors import safe_open

    found = {}
    for path in files:
        with safe_open(path, framework="numpy") as tensors:
            names = tensors.keys()
            for name in names:
                found[name] = hashlib.sha256(tensors.get_tensor(name).tobytes()).hexdigest()
    return found


def with_torch(files: list[Path]) -> dict[str, str] | None:
    """Digests of the arrays as torch tensors."""
    if importlib.util.find_spec("torch") is None:
        return None
    from safetensors.torch import load_file

    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


def main() -> None:
    """Reads the data files of the checkpoint that the command line names."""
    files = sorted(Path(sys.argv[1]).glob("*/*.safetensors"))
    answer = {"safetensors": with_safetensors(files), "torch": with_torch(files)}
    if "waystation" in sys.modules:
        raise SystemExit("this program is meant to do without Waystation, but something imported it")
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
