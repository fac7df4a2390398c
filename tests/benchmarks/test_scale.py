"""The imagined job says what a real one would, and its stages run the code that saves and loads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.scale_job import LAYERS, Job
from tests.support.long import only_long

from benchmarks import scale, scale_stages
from waystation import grid
from waystation.layouts.native import merge, read, tables


@pytest.mark.long
@only_long
def test_parts_are_those_of_the_planner() -> None:
    job = Job(48)
    job.check(range(48))
    assert len(list(job.parts())) == 48


@pytest.mark.long
@only_long
def test_the_arrays_of_a_job_are_covered_once() -> None:
    job = Job(128)
    merged = merge.merge(list(job.parts()), job.sources, job.labels)
    kinds, counts = np.unique(merged.arrays["kind"], return_counts=True)
    assert dict(zip(kinds.tolist(), counts.tolist(), strict=True)) == {
        tables.REGULAR: 3 * LAYERS,
        tables.RUNS: 7 * LAYERS,
    }
    assert sum(merged.chunk_count(array) for array in range(len(job.sources))) == (700 * 128 + 300)


@pytest.mark.parametrize("processes", [32, 16])
def test_the_boxes_of_all_that_load_cover_every_array(processes: int) -> None:
    job = Job(32)
    boxes = [job.boxes(process, processes) for process in range(processes)]
    for array, source in enumerate(job.sources):
        own = [of_process[array] for of_process in boxes]
        distinct = [own[0]] if len(source.shape) == 1 else own
        assert grid.find_cover_defect(source.shape, distinct) is None


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.share(2)
def test_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paged: bool) -> None:
    if paged:
        monkeypatch.setitem(read.read_files.__kwdefaults__, "paged_from_bytes", 0)
    job = Job(32)
    written = scale_stages.write_parts(job, tmp_path)
    assert written["part_bytes"] == sum(path.stat().st_size for path in tmp_path.iterdir())
    merged = scale_stages.merge_parts(job, tmp_path)
    assert merged["chunks"] == 700 * 32 + 300
    same = scale_stages.plan_load(job, tmp_path, 32, cold=True)
    half = scale_stages.plan_load(job, tmp_path, 16, cold=False)
    assert same["is_paged"] == half["is_paged"] == paged
    stored = sum(merged["table_bytes"][name] for name in scale_stages.TABLES)
    assert same["table_bytes_read"] <= stored * (2 if paged else 1)
    assert half["files"] == 32  # each of the small arrays is in another file
    job_found = {"processes": 32, **written, "merge": [merged]}
    job_found |= {stage: [same] for stage in scale_stages.PLANS}
    document = {"schema": 1, "machine": {"cores": 2}, "jobs": [json.loads(json.dumps(job_found))]}
    scale.show(document, scale.wide_console())
    assert [reached for _, reached in scale.targets(document)][1]
