"""The metadata of a zarr array: `zarr.json` of version 3, `.zarray` of version 2.

An array is a regular grid of chunks, each a file (or a key of an OCDBT database) of its own. Chunks at the
edge are stored in full; what of them lies beyond the array means nothing. With the codec `sharding_indexed` a
chunk is itself a grid of *inner chunks* and an index of where each is (`shard_index.py`). Invariant: an
`is_direct` array's inner chunks, or else its chunks, hold the elements in C order as the host has them, and
after them at most a checksum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from waystation._errors import Corrupt, Unsupported
from waystation.frameworks import dtypes
from waystation.layouts.orbax.json_files import dump, parse_object, reading, require, shape, text

Shape = tuple[int, ...]

_BYTES, _CHECKSUM, _SHARDING = "bytes", "crc32c", "sharding_indexed"
CHECKSUM_BYTES = 4
_LITTLE = {"name": _BYTES, "configuration": {"endian": "little"}}
# Those that change the length of a chunk; every other codec changes what its bytes mean.
_BYTE_CODECS = frozenset({"zstd", "gzip", "blosc", _CHECKSUM})


@dataclass(frozen=True, slots=True)
class Codec:
    """A codec that makes bytes of bytes: `zstd`, `gzip`, `blosc` or `crc32c`."""

    name: str
    configuration: dict[str, Any] = field(default_factory=dict)


CHECKSUM = Codec(_CHECKSUM)


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """How the index of the inner chunks of a chunk is stored.

    Attributes:
        is_at_end: Whether it is at the end of the chunk, else at its start.
        has_checksum: Whether its CRC-32C follows it.
    """

    is_at_end: bool = True
    has_checksum: bool = True


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """What the metadata of an array say.

    Attributes:
        version: Of zarr.
        shape: Of the array.
        dtype: The logical dtype of an element.
        chunk_shape: Of what has a key of its own.
        inner_chunk_shape: Of the inner chunks; None without them.
        codecs: What the bytes of a chunk, or of an inner chunk, go through after they are laid out.
        index: Of the inner chunks.
        is_ordinary: Whether elements are laid out in C order and little-endian, by codecs known here.
        separator: What is between the numbers in a key.
        has_prefix: Whether keys begin with `c`.
        fill_value: What stands for chunks that are not there, as the file has it.
    """

    version: Literal[2, 3]
    shape: Shape
    dtype: str
    chunk_shape: Shape
    inner_chunk_shape: Shape | None = None
    codecs: tuple[Codec, ...] = ()
    index: ShardIndex = ShardIndex()
    is_ordinary: bool = True
    separator: str = "/"
    has_prefix: bool = True
    fill_value: Any = None

    @property
    def has_checksum(self) -> bool:
        """Whether a chunk ends with the CRC-32C of what is before it."""
        return self.version == 3 and bool(self.codecs) and self.codecs[-1].name == _CHECKSUM

    @property
    def checksum_bytes(self) -> int:
        """Bytes of the checksum of a chunk."""
        return CHECKSUM_BYTES if self.has_checksum else 0

    @property
    def is_direct(self) -> bool:
        """Whether the elements of a chunk can be used as they are stored; a checksum may follow them."""
        return self.is_ordinary and not self._encodings

    @property
    def is_known(self) -> bool:
        """Whether chunks can be read without another library: as they are, or as single frames of zstd, with
        a checksum or without."""
        return self.is_ordinary and self._encodings in ([], ["zstd"])

    @property
    def _encodings(self) -> list[str]:
        """The names of the codecs but for that of the checksum at the end."""
        return [codec.name for codec in (self.codecs[:-1] if self.has_checksum else self.codecs)]

    @property
    def read_shape(self) -> Shape:
        """The shape of what can be read alone."""
        return self.chunk_shape if self.inner_chunk_shape is None else self.inner_chunk_shape

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return int(dtypes.of_name(self.dtype).host.itemsize)

    def chunk_key(self, place: Sequence[int]) -> str:
        """The key of a chunk, by its place in the grid."""
        numbers = list(map(str, place))
        if self.has_prefix:
            return self.separator.join(["c", *numbers])
        return self.separator.join(numbers) or "0"

    def fill_element(self) -> np.ndarray[Any, Any]:
        """The element that stands for those of chunks that are not there.

        Raises:
            Unsupported: It is said in a way that is not known here.
        """
        host = dtypes.of_name(self.dtype).host
        value = self.fill_value
        if value is None:
            return np.zeros((), host)
        try:
            if isinstance(value, str) and value.startswith("0x"):
                return np.frombuffer(int(value, 16).to_bytes(host.itemsize, "little"), host).reshape(())
            if isinstance(value, list):
                value = complex(*map(float, value))
            return np.asarray(float(value) if isinstance(value, str) else value).astype(host)
        except (TypeError, ValueError, OverflowError):
            raise Unsupported(f"the fill value {value!r:.100} of a zarr array is not known here") from None

    def encode(self) -> bytes:
        """The bytes of the file."""
        return dump(self._to_json3() if self.version == 3 else self._to_json2())

    def _to_json3(self) -> dict[str, Any]:
        codecs = [_codec_to_json(codec) for codec in self.codecs]
        chain: list[dict[str, Any]] = [_LITTLE, *codecs]
        if self.inner_chunk_shape is not None:
            index_codecs = [_LITTLE, {"name": _CHECKSUM}] if self.index.has_checksum else [_LITTLE]
            configuration = {
                "chunk_shape": self.inner_chunk_shape,
                "codecs": chain,
                "index_codecs": index_codecs,
                "index_location": "end" if self.index.is_at_end else "start",
            }
            chain = [{"name": _SHARDING, "configuration": configuration}]
        keys = "default" if self.has_prefix else "v2"
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": self.shape,
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": self.chunk_shape}},
            "chunk_key_encoding": {"name": keys, "configuration": {"separator": self.separator}},
            "fill_value": _zero(self.dtype) if self.fill_value is None else self.fill_value,
            "codecs": chain,
        }

    def _to_json2(self) -> dict[str, Any]:
        (compressor,) = self.codecs or (None,)
        return {
            "zarr_format": 2,
            "shape": self.shape,
            "chunks": self.chunk_shape,
            "dtype": _dtype_to_json2(self.dtype),
            "compressor": None if compressor is None else {"id": compressor.name, **compressor.configuration},
            "fill_value": self.fill_value,
            "filters": None,
            "order": "C",
            "dimension_separator": self.separator,
        }


def _codec_to_json(codec: Codec) -> dict[str, Any]:
    if codec.configuration:
        return {"name": codec.name, "configuration": codec.configuration}
    return {"name": codec.name}


def _zero(dtype: str) -> Any:
    category = dtypes.of_name(dtype).category
    return {"bool": False, "integer": 0, "complex": [0.0, 0.0]}.get(category, 0.0)


def _dtype_to_json2(dtype: str) -> str:
    host = dtypes.of_name(dtype).host
    return dtype if host.kind == "V" or host.isbuiltin != 1 else host.str


# ---- reading -----------------------------------------------------------------------------------


def decode(data: bytes, path: str, version: Literal[2, 3]) -> ZarrArray:
    """Reads the bytes of the file.

    Raises:
        Corrupt: They are not the metadata of an array.
        Unsupported: They are, but of a dtype or grid that is not known here.
    """
    body = parse_object(data, path)
    with reading(path):
        require(body["zarr_format"] == version, f"it is not of zarr version {version}")
        array = _from_json3(body, path) if version == 3 else _from_json2(body, path)
        for name, extents in (("chunk", array.chunk_shape), ("inner chunk", array.read_shape)):
            require(len(extents) == len(array.shape), f"an array and its {name}s differ in rank")
            require(all(extents), f"an extent of a {name} is 0")
        whole = zip(array.chunk_shape, array.read_shape, strict=True)
        require(all(outer % inner == 0 for outer, inner in whole), "inner chunks do not fill a chunk")
        require(math.prod(array.chunk_shape) < 1 << 62, "a chunk is larger than anything could be")
    return array


def _from_json3(body: dict[str, Any], path: str) -> ZarrArray:
    require(body["node_type"] == "array", "it is no array")
    dtype = _checked_dtype(body["data_type"], path)
    grid = body["chunk_grid"]
    if grid["name"] != "regular":
        raise Unsupported(f"'{path}' has chunks in a {grid['name']!r:.60} grid", path=path)
    separator, has_prefix = _keys3(body.get("chunk_key_encoding"))
    chunk_shape = shape(grid["configuration"]["chunk_shape"])
    inner: Shape | None = None
    index = ShardIndex()
    chain = _chain(body["codecs"])
    is_known = not body.get("storage_transformers")
    if len(chain) == 1 and chain[0].name == _SHARDING:
        configuration = chain[0].configuration
        inner = shape(configuration["chunk_shape"])
        index_chain = _chain(configuration["index_codecs"])
        index = ShardIndex(
            _is_at_end(configuration.get("index_location", "end")),
            [codec.name for codec in index_chain] == [_BYTES, _CHECKSUM],
        )
        is_known &= _is_laid_out(index_chain) and len(index_chain) <= 1 + index.has_checksum
        chain = _chain(configuration["codecs"])
    return ZarrArray(
        3,
        shape(body["shape"]),
        dtype,
        chunk_shape,
        inner,
        tuple(chain[1:]),
        index,
        is_known and _is_laid_out(chain),
        separator,
        has_prefix,
        body.get("fill_value"),
    )


def _chain(value: Any) -> list[Codec]:
    require(isinstance(value, list) and len(value) > 0, "there are no codecs")
    found = []
    for codec in value:
        body: dict[str, Any] = {"name": codec} if isinstance(codec, str) else codec
        configuration = body.get("configuration") or {}
        require(isinstance(configuration, dict), "a codec has no configuration")
        found.append(Codec(text(body["name"]), configuration))
    return found


def _is_laid_out(chain: Sequence[Codec]) -> bool:
    """Whether elements are little-endian, and what follows only makes bytes of bytes."""
    first, *others = chain
    is_little = first.name == _BYTES and first.configuration.get("endian", "little") == "little"
    return is_little and all(codec.name in _BYTE_CODECS for codec in others)


def _is_at_end(value: Any) -> bool:
    require(value in ("start", "end"), "an index is neither at the start nor at the end")
    return bool(value == "end")


def _keys3(value: Any) -> tuple[str, bool]:
    encoding = value or {"name": "default"}
    name, configuration = encoding["name"], encoding.get("configuration") or {}
    require(name in ("default", "v2"), "the keys of chunks are of an unknown kind")
    return _separator(configuration.get("separator", "/" if name == "default" else ".")), name == "default"


def _separator(value: Any) -> str:
    require(value in ("/", "."), "the separator in keys is neither a slash nor a dot")
    return str(value)


def _from_json2(body: dict[str, Any], path: str) -> ZarrArray:
    named = body["dtype"]
    if not isinstance(named, str):
        raise Unsupported(f"'{path}' is an array of structures, which is not known here", path=path)
    compressor = body.get("compressor")
    require(compressor is None or isinstance(compressor, dict), "a compressor is no object")
    configuration = dict(compressor or {})
    codecs = (Codec(text(configuration.pop("id")), configuration),) if compressor else ()
    return ZarrArray(
        2,
        shape(body["shape"]),
        _checked_dtype(_dtype_of_json2(named), path),
        shape(body["chunks"]),
        codecs=codecs,
        is_ordinary=not named.startswith(">") and body.get("order", "C") == "C" and not body.get("filters"),
        separator=_separator(body.get("dimension_separator", ".")),
        has_prefix=False,
        fill_value=body.get("fill_value"),
    )


def _dtype_of_json2(named: str) -> str:
    return np.dtype(named).newbyteorder("=").name if named[:1] in "<>|" else named


def _checked_dtype(value: Any, path: str) -> str:
    if not isinstance(value, str) or value not in dtypes.TABLE or dtypes.TABLE[value].category == "packed":
        raise Unsupported(f"'{path}' is an array of {value!r:.60}, a dtype that is not known here", path=path)
    return value


def check_size(array: ZarrArray, path: str) -> None:
    """Refuses an array that has more bytes, or more chunks, than could be.

    Raises:
        Corrupt: It is such an array.
    """
    chunks = math.prod(
        -(-extent // step) for extent, step in zip(array.shape, array.chunk_shape, strict=True)
    )
    if math.prod(array.shape) * array.item_bytes >= 1 << 62 or chunks > 1 << 24:
        raise Corrupt(f"'{path}' describes an array of {array.shape} in {chunks} chunks", path=path)
