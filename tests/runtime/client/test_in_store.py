"""Arrays of hosts in object stores: hosts reach them as the program does, and no message shows how."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.s3 import SECRET_KEY, bucket

import waystation
from waystation import runtime
from waystation._options.in_effect import current_options
from waystation.errors import Conflict, Unsupported
from waystation.runtime.host_options import options_for_hosts


def test_a_state_is_saved_loaded_and_replaced_there(client: runtime.Client) -> None:
    place = bucket()
    path = f"{place.location}/run/1"
    on = client.make_virtual_device_set().add_slice(devices=4)
    array = client.put(np.arange(64, dtype=np.float32).reshape(8, 8), on)
    with place.context():
        waystation.save(path, {"array": array, "step": 3})
        loaded = waystation.load(path, {"array": array, "step": 0})
        assert np.array_equal(np.asarray(loaded["array"]), np.arange(64).reshape(8, 8))
        assert loaded["step"] == 3
        plain = waystation.load(path)  # by this process, without hosts
        assert np.array_equal(np.asarray(plain["array"]), np.arange(64).reshape(8, 8))
        with pytest.raises(Conflict, match="overwrite"):
            waystation.save(path, {"array": array, "step": 4})
        waystation.save_async(path, {"array": array, "step": 5}, overwrite=True).result()
        assert waystation.load_async(path, {"array": array, "step": 0}).result()["step"] == 5
        waystation.delete(path)
        # Hosts read files that are shared with a step that is deleted.
        values = {"array": np.arange(64, dtype=np.float32).reshape(8, 8), "step": 1}
        waystation.save(path, values)
        waystation.save(f"{place.location}/run/2", {**values, "step": 2}, unchanged_from=path)
        waystation.delete(path)
        loaded = waystation.load(f"{place.location}/run/2", {"array": array, "step": 0})
        assert loaded["step"] == 2
        assert np.array_equal(np.asarray(loaded["array"]), values["array"])
        waystation.delete(f"{place.location}/run/2")
    assert place.names() == []


def test_parts_of_several_islands_need_a_file_system(client: runtime.Client) -> None:
    place = bucket()
    devices = client.make_virtual_device_set()
    state = {name: client.put(np.arange(8), devices.add_slice(devices=4)) for name in ("a", "b")}
    with place.context(), pytest.raises(Unsupported, match="to a file system only"):
        waystation.save(f"{place.location}/run/1", state)
    assert place.names() == []


def test_settings_are_told_to_hosts_and_not_shown() -> None:
    context = bucket().context()
    with context:
        told = options_for_hosts(current_options())
    assert SECRET_KEY not in repr(told)
    assert told.context().storage.settings == context.storage.settings
    assert told.context().storage.deadline_s == context.storage.deadline_s
