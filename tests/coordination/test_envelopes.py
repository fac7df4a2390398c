"""Values of any size go through a store, and come out as they were or not at all."""

import pytest
import torch.distributed
from hypothesis import example, given
from hypothesis import strategies as st

from waystation.coordination import envelopes
from waystation.coordination.envelopes import FAILURE, INLINE_BYTES, PART
from waystation.coordination.torch_distributed import TorchStore
from waystation.errors import Internal

LIMIT = TorchStore.message_bytes


@pytest.fixture
def store() -> TorchStore:
    kept = torch.distributed.HashStore()
    return TorchStore(lambda: kept)


@pytest.mark.parametrize(
    ("size", "pieces"),
    [
        (0, 0),
        (INLINE_BYTES, 0),
        (INLINE_BYTES + 1, 1),
        (LIMIT, 1),
        (LIMIT + 1, 2),
        (3 * LIMIT, 3),
        (3 * LIMIT + 1, 4),
    ],
)
def test_values_of_any_size(size: int, pieces: int, store: TorchStore) -> None:
    value = (b"\n{}" * (size // 3 + 1))[:size]
    agreement = {"what": "save '/x\udcff\n'", "primary": 3}
    sealed, keys = envelopes.seal(store, PART, value, "at", agreement)
    assert len(sealed) < INLINE_BYTES + 200
    assert keys == [f"at/{index}" for index in range(pieces)]
    envelope = envelopes.unseal(sealed)
    assert (envelope.kind, envelope.pieces, envelope.agreement) == (PART, pieces, agreement)
    assert envelopes.content(store, envelope, "at") == value
    if pieces:
        store.delete(keys[-1:])
        assert envelopes.content(store, envelope, "at") is None


def test_errors_travel_inside_of_their_envelopes(store: TorchStore) -> None:
    encoded = bytes(envelopes.INLINE_BYTES * 4)
    sealed, keys = envelopes.seal(store, FAILURE, encoded, "at")
    assert keys == []
    assert envelopes.content(store, envelopes.unseal(sealed), "at") == encoded


@given(st.binary(max_size=200) | st.builds(lambda line: line.encode() + b"\n", st.text()))
@example(b"[]\n")
@example(b"{}\n")
@example(b'{"kind": "part", "pieces": null}')
def test_other_bytes_are_refused(sealed: bytes) -> None:
    with pytest.raises(Internal, match=rf"sent {len(sealed)} bytes that are not understood; check"):
        envelopes.unseal(sealed)
