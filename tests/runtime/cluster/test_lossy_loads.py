"""Casts that lose more than rounding raise, also where hosts load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.runtime.cluster.driving import visiting

import waystation as ws
from waystation.errors import LossyCast


def test_a_lossy_cast_on_hosts_raises_and_names_the_array(address: str, tmp_path: Path) -> None:
    model, big = np.array([2.7, np.nan], np.float32), np.array([1e30, 1.0])
    ws.save(tmp_path / "state", {"model": [model], "big": big})
    with visiting(address) as cluster:
        cluster.add_island("lossy")
        with cluster.start_client() as client:
            on = client.make_virtual_device_set().add_slice(devices=1, island="lossy")

            def read(state: dict) -> None:
                for array in (*state["model"], state["big"]):
                    array.numpy()

            def like(first: type, second: type) -> dict:
                return {
                    "model": [client.put(np.zeros(2, first), on)],
                    "big": client.put(np.zeros(2, second), on),
                }

            for first, second, name in (
                (np.int32, np.float32, "model.0"),  # which is refused before anything is read
                (np.float32, np.float16, "big"),  # which the elements decide
            ):
                for load in (client.load, ws.load):
                    with pytest.raises(LossyCast, match="allow_lossy_casts") as raised:
                        read(load(str(tmp_path / "state"), like(first, second)))
                    assert raised.value.context["array"] == name
                with pytest.raises(LossyCast, match="allow_lossy_casts"):
                    client.load_async(str(tmp_path / "state"), like(first, second)).result()
            context = ws.Context()
            context.array.loading.allow_lossy_casts = True
            with context:
                state = client.load(str(tmp_path / "state"), like(np.int32, np.float16))
            assert state["model"][0].numpy()[0] == 2
            assert state["big"].numpy().tolist() == [np.inf, 1]
