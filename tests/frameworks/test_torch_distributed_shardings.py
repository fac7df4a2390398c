"""Descriptions of DTensors: through JSON and back, and what no save could have written."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from waystation.errors import Corrupt
from waystation.frameworks.torch_shardings import MeshDescription, describe, is_dtensor, parse
from waystation.frameworks.torch_shards import Split

MESH = MeshDescription("cuda", (2, 2), ("dp", "tp"), (0, 1, 2, 3, 4, 5, 6, 7), 8)
SPLITS = (Split(0, 2), None)
DESCRIPTION = describe(MESH.to_json(), SPLITS)


def test_descriptions_come_back_from_json() -> None:
    plain = MeshDescription("cpu", (3,), None, (4, 0, 2), 5)
    for mesh, splits in ((MESH, SPLITS), (MESH, (Split(1), Split(1))), (plain, (Split(0),))):
        description = json.loads(json.dumps(describe(mesh.to_json(), splits)))
        assert is_dtensor(description)
        assert parse(description, (6, 4)) == (mesh, splits)
    assert MESH.copies().tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert str(MESH) == "a mesh (dp=2, tp=2) of cuda devices in a program of 8 processes"
    assert not is_dtensor(None)
    assert not is_dtensor({"kind": "torch", "device": "cuda:0"})


@pytest.mark.parametrize(
    ("where", "value", "complaint"),
    [
        (("mesh",), 5, "no mesh"),
        (("placements",), None, "no placements"),
        (("placements",), [["replicate"]], "one placement for each"),
        (("placements", 0), "replicate", "no list"),
        (("placements", 0), [], "no list"),
        (("placements", 0), ["shard"], "no known kind"),
        (("placements", 0), ["shard", 0, 1], "no known kind"),
        (("placements", 0), ["partial"], "no known kind"),
        (("placements", 0), ["shard", True], "no number"),
        (("placements", 0), ["shard", 2], "lacks"),
        (("placements", 0), ["shard", -1], "lacks"),
        (("placements", 0), ["strided_shard", 0, 0], "lacks"),
        (("mesh", "device_type"), None, "no type of device"),
        (("mesh", "process_count"), "8", "without processes"),
        (("mesh", "process_count"), 7, "the program had not"),
        (("mesh", "shape"), [], "no processes"),
        (("mesh", "shape"), [2, 0], "no processes"),
        (("mesh", "shape"), [2, 3], "lacks processes"),
        (("mesh", "shape"), [2, -2], "no number"),
        (("mesh", "shape"), "22", "no shape"),
        (("mesh", "ranks"), [], "lacks processes"),
        (("mesh", "ranks"), [0, 1, 2, 2], "twice"),
        (("mesh", "ranks"), [0, 1, 2, 3.0], "no number"),
        (("mesh", "axis_names"), ["dp"], "lack names"),
        (("mesh", "axis_names"), ["dp", 2], "no string"),
        (("mesh", "axis_names"), ["dp", "dp"], "one name"),
        (("mesh", "axis_names"), None, "copies"),
    ],
)
def test_impossible_descriptions_are_corrupt(where: tuple[Any, ...], value: Any, complaint: str) -> None:
    broken = copy.deepcopy(DESCRIPTION)
    inner: Any = broken
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    with pytest.raises(Corrupt, match=complaint):
        parse(broken, (6, 4))
