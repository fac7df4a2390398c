"""What stands at a path where a checkpoint was expected: files of other programs, and what opens them.

Files are told by their first bytes, and only where these say nothing by their name. Nothing is parsed, and
nothing is raised: what cannot be looked at is not described.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

TORCH_METADATA = ".metadata"  # the file that torch's DCP writes last
_LOOKED_AT_BYTES = 512
_LFS = b"version https://git-lfs"
_SAFETENSORS_HEADER_LIMIT_BYTES = 100_000_000

_TORCH = "a file of torch.save; 'torch.load' opens it"
_BY_FIRST_BYTES = [
    (_LFS, "a pointer of Git LFS, not the file itself; run 'git lfs pull' in its repository"),
    (b"GGUF", "a GGUF file; llama.cpp and the package gguf open it"),
    (b"\x93NUMPY", "an array of NumPy; 'numpy.load' opens it"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file; h5py opens it, and Keras its own weights"),
]
_HTML = (b"<!doctype html", b"<html")
_BY_SUFFIX = {
    ".onnx": "an ONNX file; the package onnx opens it",
    ".msgpack": "a msgpack file; 'flax.serialization.msgpack_restore' opens those of Flax",
    ".keras": "a model of Keras; 'keras.models.load_model' opens it",
    ".tflite": "a model of TensorFlow Lite",
}
_TORCH_NAMES = re.compile(r"(pytorch_model.*\.bin|.*\.(pt|pth|ckpt))")
# An organisation and a model, as hubs name them: 'meta-llama/Llama-3.1-8B'.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/(?=[^/]*-)(?=[^/]*[A-Za-z])[\w.-]+")


def described(path: str) -> str | None:
    """What stands at a path, as the end of a sentence; None if that is not known."""
    try:
        if os.path.isdir(path):
            return _described_directory(path)
        if os.path.isfile(path):
            with open(path, "rb") as file:
                return described_bytes(file.read(_LOOKED_AT_BYTES), path)
    except OSError:
        pass
    return None


def described_bytes(first: bytes, path: str) -> str | None:
    """What a file is by its first bytes and its name; None if that is not known."""
    for beginning, text in _BY_FIRST_BYTES:
        if first.startswith(beginning):
            return text
    if first.lstrip()[: len(_HTML[0])].lower().startswith(_HTML):
        return (
            "a page of HTML, as servers send for a directory or in place of a file; give the URL of the file "
            "itself (on the Hugging Face hub /resolve/ where the page has /blob/)"
        )
    if first.startswith(b"PK\x03\x04"):
        return _described_archive(first, path)
    if re.match(rb"\x80[\x02-\x05]", first):
        return (
            "a pickle, as pickle.dump and older versions of torch.save write; it runs code when it is opened"
        )
    length = int.from_bytes(first[:8], "little")
    if first[8:9] == b"{" and 0 < length <= _SAFETENSORS_HEADER_LIMIT_BYTES:
        return "a safetensors file; 'waystation.safetensors.load' opens it"
    return _BY_SUFFIX.get(os.path.splitext(path)[1].lower())


def _described_archive(first: bytes, path: str) -> str | None:
    """A zip archive by the name of its first entry."""
    if path.endswith(".distcp"):
        return "a part of a checkpoint of torch.distributed.checkpoint, whose load opens the directory"
    name = first[30 : 30 + int.from_bytes(first[26:28], "little")]
    if name.endswith((b"/data.pkl", b"/.format_version")):
        return _TORCH
    if name.endswith(b".npy"):
        return "an archive of NumPy; 'numpy.load' opens it"
    return _BY_SUFFIX.get(os.path.splitext(path)[1].lower())


def is_of_torch(names: Iterable[str]) -> bool:
    """Whether these are the files of a checkpoint of `torch.distributed.checkpoint`, or of a save that has
    not ended."""
    return any(name.endswith(".distcp") for name in names)


def is_torch_checkpoint(path: str) -> bool:
    """Whether a directory is a checkpoint of `torch.distributed.checkpoint`, whose save has ended."""
    names = os.listdir(path)
    return TORCH_METADATA in names and is_of_torch(names)


def _described_directory(path: str) -> str | None:
    names = sorted(os.listdir(path))
    if is_torch_checkpoint(path):
        return (
            "a checkpoint of torch.distributed.checkpoint; 'torch.distributed.checkpoint.load' opens it, and "
            "'python -m torch.distributed.checkpoint.format_utils dcp_to_torch' converts it"
        )
    if is_of_torch(names):
        return (
            "a save of torch.distributed.checkpoint that has not ended: it lacks .metadata, and nothing "
            "loads it; load an earlier one"
        )
    if "trainer_state.json" in names:
        return (
            "a checkpoint of the Trainer of transformers; give its path to Trainer.train as "
            "resume_from_checkpoint"
        )
    if "random_states_0.pkl" in names:
        return "saved by Accelerate; 'accelerator.load_state' loads it"
    tensors = [name for name in names if name.endswith((".safetensors", ".safetensors.index.json"))]
    if tensors or "snapshots" in names:
        pointer = next((text for name in tensors if (text := _pointer(os.path.join(path, name)))), None)
        return pointer or "a directory of safetensors files; 'waystation.safetensors.load' opens it"
    if "saved_model.pb" in names:
        return "a SavedModel of TensorFlow; 'tensorflow.saved_model.load' opens it"
    of_torch = [name for name in names if _TORCH_NAMES.fullmatch(name)]
    if of_torch:
        return f"a directory with files of torch.save ({', '.join(of_torch[:3])}); 'torch.load' opens each"
    gguf = next((name for name in names if name.endswith(".gguf")), None)
    return None if gguf is None else f"a directory with the GGUF file {gguf}; llama.cpp opens it"


def _pointer(path: str) -> str | None:
    with open(path, "rb") as file:
        if file.read(len(_LFS)) != _LFS:
            return None
    return (
        f"a directory whose {os.path.basename(path)} is a pointer of Git LFS, not the file itself; run "
        "'git lfs pull' there"
    )


def hub_advice(path: str) -> str:
    """What to do where nothing is at a path that reads like the name of a model on a hub; else empty."""
    name = os.path.relpath(path)
    if _HUB_ID.fullmatch(name) is None or os.path.exists(os.path.dirname(path)):
        return ""
    return (
        f"; if '{name}' is the name of a model on the Hugging Face hub, 'hf download {name}' prints the "
        "directory that 'waystation.safetensors.load' opens"
    )
