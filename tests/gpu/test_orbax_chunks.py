"""Chunks of Orbax's layouts whose arrays are in device memory that no framework owns: bytes and checksums."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from benchmarks.cuda_driver import CudaDriver

import waystation
from waystation import _native
from waystation._options.in_effect import current_options
from waystation.frameworks import registry
from waystation.layouts.native.chunks import ALONE
from waystation.layouts.native.write import Observer
from waystation.layouts.orbax import write_data, write_parts, write_plan
from waystation.layouts.orbax.frame_limits import FrameLimits

CHUNK_BYTES = 300_000


@pytest.mark.parametrize("use_ocdbt", [False, True], ids=["files", "ocdbt"])
def test_checksums_are_those_of_the_device(driver: CudaDriver, tmp_path: Path, *, use_ocdbt: bool) -> None:
    host = np.random.default_rng(0).integers(0, 256, 7 * CHUNK_BYTES, np.uint8)
    context = waystation.Context()
    saving = context.array.saving
    saving.use_ocdbt, saving.use_compression = use_ocdbt, False
    saving.storage_options.chunk_bytes = CHUNK_BYTES
    with context:
        options = current_options()
    sources = registry.codec_by_name("numpy").sources([host])
    arrays = write_plan.cut(["w"], sources, options.array.saving, ALONE, {}, FrameLimits())
    arrays.describe()
    directory = tmp_path / "state"
    (directory / "w").mkdir(parents=True)
    (directory / "ocdbt.process_0" / "d").mkdir(parents=True)
    observer = Observer(lambda _: None, lambda: None, {}, lambda: None, alone=False)
    with driver.device_memory(host.nbytes) as address:
        driver.copy_to_device(address, host.ctypes.data, host.nbytes)
        for value in arrays.values:
            value.chunk.blocks = [
                dataclasses.replace(
                    block, address=block.address - host.ctypes.data + address, device=driver.ordinal
                )
                for block in value.chunk.blocks
            ]
        planned = write_plan.plan(arrays, 0)
        prepared = write_data.Prepared("state", arrays, planned, [], is_waited_for=False)
        group = _native.SyncGroup(str(tmp_path))
        (part,) = write_data.write(
            str(tmp_path), [prepared], 0, options, FrameLimits(), observer, lambda: False, group
        )
    assert len(part.rows) == 7
    for number, file, offset, nbytes in part.rows[:, write_parts.NUMBER :].tolist():
        content = (directory / part.files[file].name).read_bytes()[offset : offset + nbytes]
        expected = host[CHUNK_BYTES * number : CHUNK_BYTES * (number + 1)].tobytes()
        assert content == expected + _native.crc32c(expected).to_bytes(4, "little")
