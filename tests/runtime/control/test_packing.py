"""What is told comes out of packs as it went in, and what is the same each time travels once."""

from __future__ import annotations

import enum
import importlib
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation._options.layouts import AtomicityMode, CheckpointLayout
from waystation.errors import Corrupt, InvalidInput
from waystation.frameworks.base import StoredArray
from waystation.frameworks.carried import AbstractKeys, CarriedArray
from waystation.frameworks.numpy_arrays import AbstractNumpy
from waystation.runtime.control import packing
from waystation.runtime.control.host_messages import (
    AbandonWork,
    BeginMessage,
    ReleaseBuffers,
    Told,
    pack_done,
    pack_told,
    unpack_done,
    unpack_told,
)
from waystation.runtime.control.packing import Packer, Unpacker
from waystation.runtime.controller.lowered import Dispatch
from waystation.runtime.devices import DeviceId
from waystation.runtime.errors import HostLost
from waystation.runtime.host_options import HostOptions, SaveManner
from waystation.runtime.ir import Sharding, Value
from waystation.runtime.messages import Done, Fetched, Get, Message, Put, Restore, Run, Save, Spill
from waystation.runtime.resources import Placement, SliceRequest
from waystation.runtime.state_trees import StateTree

NUMBERS = st.integers(-(2**63), 2**63 - 1)
SOME = st.lists(NUMBERS, max_size=4).map(tuple)
NAMES = st.sampled_from(["train", "evaluate", ""])
PEERS = st.sampled_from([(), (("left/0", "left/0/e1@127.0.0.1:4000"),)])
INSTRUCTIONS = st.one_of(
    st.builds(Run, NAMES, SOME, SOME, SOME, PEERS),
    st.builds(Get, NUMBERS),
    st.builds(Spill, NUMBERS),
    st.builds(Restore, NUMBERS),
    st.builds(
        Save, NAMES, st.just(StateTree.of_names("x")), st.just(((0, 1),)), st.just((0, 1)), st.booleans()
    ),
)
MESSAGES = st.builds(Message, NUMBERS, NAMES, st.lists(INSTRUCTIONS, max_size=3).map(tuple))
TOLD = st.one_of(st.builds(BeginMessage, NUMBERS, MESSAGES), st.builds(ReleaseBuffers, SOME))


def through(told: list[Told], packer: Packer, unpacker: Unpacker) -> list[Told]:
    return list(unpack_told(unpacker.open(pack_told(told, packer))))


@given(st.lists(st.lists(TOLD, max_size=5), max_size=5))
def test_what_a_host_is_told_arrives(batches: list[list[Told]]) -> None:
    packer, unpacker = Packer(), Unpacker()
    for told in batches:
        assert through(told, packer, unpacker) == told


def test_errors_and_arrays_arrive() -> None:
    packer, unpacker = Packer(), Unpacker()
    sharding = Sharding((("d", 1),), (("d",),))
    value = Value(0, (4,), "float32", 0, sharding)
    put = Put(3, np.arange(4, dtype=np.float32), value, Placement("left", 1, (DeviceId("left/0", 0),)))
    error = InvalidInput("it will not", host="left/0")
    begun, abandoned = through(
        [BeginMessage(0, Message(7, "put", (put,))), AbandonWork(7, error, True)], packer, unpacker
    )
    assert isinstance(begun, BeginMessage)
    assert isinstance(abandoned, AbandonWork)
    (found,) = begun.message.instructions
    assert isinstance(found, Put)
    np.testing.assert_array_equal(found.array, put.array)
    assert (found.handle, found.value, found.placement) == (3, value, put.placement)
    assert (str(abandoned.error), abandoned.has_ended) == (str(error), True)
    done = [Done(7, 0.5, error), Done(8, 0.25), Done(9, 0.0, None, (Fetched((1,), (((0,), np.ones(1)),)),))]
    failed, ended, fetched = unpack_done(unpacker.open(pack_done(done, packer)))
    assert isinstance(failed.error, InvalidInput)
    assert (ended.work, ended.device_seconds, ended.error, ended.fetched) == (8, 0.25, None, ())
    assert fetched.fetched[0].blocks[0][1] == 1


@pytest.mark.parametrize(
    "value",
    [
        SliceRequest.of(4, host_labels={"zone": "a"}, shared=True),
        Dispatch.SEQUENTIAL,
        Sharding((("d", 1),), (("d",),)),
        Value(0, (4,), "float32", 0, Sharding((("d", 1),))),
        StateTree.of_names("x"),
        StateTree(b"{}", ((0, 1), (1, "x"), (2, b"y"), (3, ...), (4, int), (5, 1j), (6, np.float32(1)))),
        StateTree(b"{}", ((0, AbstractNumpy((2,), ml_dtypes.bfloat16)), (1, AbstractKeys((), "key<fry>")))),
        SaveManner(
            True, {"a": [1, None]}, HostOptions((("checkpoint_layout", CheckpointLayout.SAFETENSORS),))
        ),
        HostOptions((("atomicity.mode", AtomicityMode.AUTO),), ((0, ("bfloat16", 4096, (0,))),)),
        ml_dtypes.bfloat16(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_programs_tell_the_manager_arrives(value: Any) -> None:
    packer = Packer()
    packer.integers.append(packer.object(value))
    assert Unpacker("one").open(packer.take()).object() == value


def test_what_travels_for_others_to_save_arrives() -> None:
    packer = Packer()
    stored = StoredArray((2,), "float16", "torch", "F16", (2,), None, {"requires_grad": True})
    packer.integers.append(packer.object(CarriedArray(stored, 2, np.arange(4, dtype=np.uint8))))
    found = Unpacker("one").open(packer.take()).object()
    assert (found.stored, found.item_bytes, found.data.tolist()) == (stored, 2, [0, 1, 2, 3])


def test_what_the_manager_takes_is_there() -> None:
    for module, names in packing.MESSAGES.items():
        assert names <= vars(importlib.import_module(module)).keys()


def test_members_of_a_programs_enumerations_arrive_as_plain_text_and_numbers() -> None:
    class Side(enum.StrEnum):
        LEFT = "left"

    class Mixed(str, enum.Enum):  # noqa: UP042
        LEFT = "left"

    class Count(enum.IntEnum):
        TWO = 2

    class Share(float):
        pass

    class Key(bytes):
        pass

    told = [Side.LEFT, Mixed.LEFT, Count.TWO, Share(0.5), Key(b"k"), np.float64(0.5), np.str_("text")]
    packer = Packer()
    packer.integers.append(packer.object(told))
    found = Unpacker("one").open(packer.take()).object()
    assert found == ["left", "left", 2, 0.5, b"k", 0.5, "text"]
    assert [type(each) for each in found] == [str, str, int, float, bytes, np.float64, np.str_]


class OwnError(HostLost):
    """An error of a program's own, which the manager cannot import."""


def test_errors_of_a_programs_own_arrive_as_what_they_are_based_on() -> None:
    packer = Packer()
    error = OwnError("it will not", host="left/0", count=3, where=Path("here"), dtype=np.str_("x"))
    done = unpack_done(Unpacker("left/0").open(pack_done([Done(7, 0.5, error)], packer)))
    assert type(done[0].error) is HostLost
    assert done[0].error.context == {"host": "left/0", "count": 3, "where": "here", "dtype": "x"}
    assert type(done[0].error.context["dtype"]) is str


def test_to_run_a_list_once_more_is_a_few_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    packer, unpacker = Packer(), Unpacker()
    told: list[Told] = [BeginMessage(0, Message(1, "train", (Run("f" * 64, (1,), (2,)),)))]
    sizes = [len(pack) for pack in (pack_told(told, packer) for _ in range(3)) if unpacker.open(pack)]
    assert sizes[0] > sizes[1] == sizes[2] < 150
    monkeypatch.setattr(packing, "MOST_KNOWN", 4)
    for number in range(10):
        named: list[Told] = [BeginMessage(number, Message(1, f"program {number}", ()))]
        assert through(named, packer, unpacker) == named
        assert len(unpacker._known) <= 4 + 2


@pytest.mark.parametrize(
    "given",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(6, dtype=">i2").reshape(2, 3).T,
        np.zeros((0, 3), bool),
        np.array(5, np.uint8),
        np.ones(3, ml_dtypes.bfloat16),
        np.ones(3, ml_dtypes.int4),
        np.array(["one", "three"]),
        np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    ],
    ids=lambda given: str(given.dtype),
)
def test_the_elements_of_arrays_are_not_pickled(given: np.ndarray[Any, Any]) -> None:
    packer, unpacker = Packer(), Unpacker()
    # Wherever it is, and beside others.
    packer.integers.append(packer.object({"in": [np.ones(2), given, np.arange(3)]}))
    packed = packer.take()
    assert packed.endswith(np.ascontiguousarray(given).tobytes() + np.arange(3).tobytes())
    _, found, _ = unpacker.open(packed).object()["in"]
    assert (found.dtype, found.shape) == (given.dtype, given.shape)
    np.testing.assert_array_equal(found, given)
    assert found.flags.writeable


def test_an_array_outside_of_its_pack_is_refused() -> None:
    packer = Packer()
    packer.integers.append(packer.object(np.ones(4)))
    packed = packer.take()
    said = struct.Struct("<BQQQ")
    forget, count, objects, elements = said.unpack_from(packed)
    short = said.pack(forget, count, objects, elements - 1) + packed[said.size : -1]
    with pytest.raises(Corrupt, match="lies outside of its pack"):
        Unpacker().open(short)


def test_what_is_no_pack_is_refused() -> None:
    pack = pack_told([ReleaseBuffers((1, 2))], Packer())
    for damaged in (pack[:-1], pack + b"x", b"", b"no pack"):
        with pytest.raises(Corrupt):
            Unpacker().open(damaged)
    packer = Packer()
    packer.integers.append(17)
    with pytest.raises(Corrupt, match="kind 17"):
        list(unpack_told(Unpacker().open(packer.take())))
