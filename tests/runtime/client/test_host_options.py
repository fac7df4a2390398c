"""Which options hosts are told, and that none is forgotten."""

from __future__ import annotations

import dataclasses
import enum
import functools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from orbax.checkpoint._src.serialization.types import DefaultSerializationStatusCallback

from waystation._options import Options
from waystation._options.base import Alias, OptionGroup
from waystation.errors import Unsupported
from waystation.runtime import host_options
from waystation.runtime.host_options import HostOptions, options_for_hosts


def written(group: type[OptionGroup], made: OptionGroup, prefix: str = "") -> Iterator[tuple[str, str]]:
    """All options, and what the source says of their types."""
    for field in dataclasses.fields(group):  # type: ignore[arg-type]  # all groups are dataclasses
        if isinstance(vars(group).get(field.name), Alias):
            continue
        value = getattr(made, field.name)
        if isinstance(value, OptionGroup):
            yield from written(type(value), value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", str(field.type)


def test_what_is_not_plain_is_not_told() -> None:
    """An option that is added later is told to hosts, unless it is said here that it is not."""
    options = Options()
    types = dict(written(Options, options))
    assert types.keys() == dict(options.walk()).keys()
    elsewhere = host_options._OF_THE_PROGRAM | host_options._SAID_OTHERWISE | host_options._REFUSED.keys()
    assert elsewhere <= types.keys()
    for name, value in options.walk():
        if name in {*elsewhere, "array.saving.array_metadata_store", "storage.settings"}:
            continue
        assert value is None or isinstance(value, bool | int | float | str | enum.Enum), name
        assert not any(word in types[name] for word in ("Callable", "type[", "Creator")), name


def test_options_come_back_as_they_were() -> None:
    options = Options()
    options.array.saving.use_ocdbt = False
    options.array.saving.array_metadata_store = None
    options.array.loading.load_and_broadcast_options.replica_axis_index = "x"
    options.file.path_permission_mode = 0o750
    options.array.saving.storage_options.chunk_axes = (0, -1)
    options.storage.settings = {"aws_region": "eu-west-1"}
    options.storage.deadline_s = 3.0
    told = pickle.loads(pickle.dumps(options_for_hosts(options)))
    assert told.has(host_options.LAYOUT)
    found = dict(told.context()._options.walk())
    assert found == dict(options.walk())


def test_defaults_are_not_told() -> None:
    assert options_for_hosts(Options()) == HostOptions()
    assert not HostOptions().has(host_options.LAYOUT)


@pytest.mark.parametrize("name", sorted(host_options._REFUSED))
def test_refusals_name_the_option(name: str) -> None:
    *groups, option = name.split(".")
    options = Options()
    values: dict[str, Any] = {"sharding_for": print, "on_statistics": print, "select": print}
    values["serialization_status_callback"] = DefaultSerializationStatusCallback()
    setattr(functools.reduce(getattr, groups, options), option, values.get(option, True))
    with pytest.raises(Unsupported, match=f"cannot heed the option {name}: "):
        options_for_hosts(options)
