"""Sealed JSON through the native module, and the boundary that all format functions share."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation import _native
from waystation.errors import Corrupt, InvalidInput

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8"), max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


@given(value=VALUES)
def test_a_sealed_record_is_json_and_opens_to_its_body(value: object) -> None:
    body = json.dumps(value).encode()
    sealed = _native.seal_json(body)
    assert json.loads(sealed) == {"crc64": f"{_native.crc64(body):016x}", "record": value}
    assert _native.open_sealed_json(sealed, "record.json") == body


def test_the_checksum_is_the_published_one() -> None:
    assert _native.crc64(b"123456789") == 0xAE8B14860A799888
    assert _native.crc64(b"") == 0
    assert _native.BLOCK_BYTES == 262144


def test_any_damage_is_corrupt_and_names_the_file() -> None:
    sealed = _native.seal_json(b'{"version":1}')
    damaged = [sealed[:-1], sealed + b"\n", b" " + sealed, b"", b"{}", sealed.replace(b"1}", b"2}")]
    for data in damaged:
        with pytest.raises(Corrupt) as caught:
            _native.open_sealed_json(data, "run/1200/checkpoint.json")
        assert caught.value.context == {"path": "run/1200/checkpoint.json"}


def test_a_body_must_be_text() -> None:
    for body in (b"", b"\xff"):
        with pytest.raises(InvalidInput, match="UTF-8"):
            _native.seal_json(body)


def test_any_contiguous_buffer_will_do() -> None:
    numbers = np.arange(12, dtype=np.int64)
    expected = _native.crc64(numbers.tobytes())
    assert _native.crc64(numbers) == expected
    assert _native.crc64(memoryview(numbers)) == expected
    assert _native.crc64(bytearray(numbers.tobytes())) == expected
    assert _native.crc64(numbers.reshape(3, 4)) == expected
    with pytest.raises(InvalidInput, match="contiguous"):
        _native.crc64(numbers[::2])
    with pytest.raises(TypeError):
        _native.crc64("text")  # type: ignore[arg-type]
