"""What handlers do, who is asked, and what happens to their errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.handlers.cases import CASES, Case, case, registry_of, state
from tests.handlers.examples import (
    AbstractCounter,
    Counter,
    CounterHandler,
    Failing,
    Iterator,
    OtherCounterHandler,
    SubdirectoryHandler,
)

# ---- handlers ----------------------------------------------------------------------------------


@case
def a_handler(ocp: Any, path: Path) -> Any:
    with registry_of(ocp, CounterHandler):
        ocp.save_checkpointables(path, {"model": state(), "counter": Counter(3)})
        loaded = [
            ocp.load_checkpointables(path)["counter"].value,
            ocp.load_checkpointables(path, {"counter": None})["counter"].value,
            ocp.load_checkpointables(path, {"counter": AbstractCounter(4)})["counter"].value,
        ]
        found = ocp.checkpointables_metadata(path).metadata
    return loaded, sorted(found), found["counter"]


@case
def files_below(ocp: Any, path: Path) -> Any:
    with registry_of(ocp, SubdirectoryHandler):
        ocp.save_checkpointables(path, {"counter": Counter(3)})
        return ocp.load_checkpointables(path)["counter"].value


@case
def files_are_where_programs_look(ocp: Any, path: Path) -> Any:
    with registry_of(ocp, SubdirectoryHandler):
        ocp.save_checkpointables(path, {"counter": Counter(3), "iter": Iterator(7), "model": state()})
    return {
        name: sorted(
            file.relative_to(path / name).as_posix()
            for file in (path / name).rglob("*")
            if not file.name.startswith(".")
        )
        for name in ("counter", "iter")
    }


@case
def the_last_one_saves(ocp: Any, path: Path) -> Any:
    with registry_of(ocp, CounterHandler, OtherCounterHandler):
        ocp.save_checkpointables(path, {"counter": Counter(3)})
    with registry_of(ocp, OtherCounterHandler):
        return ocp.load_checkpointables(path, {"counter": AbstractCounter()})["counter"].value


@case
def the_bound_one_saves(ocp: Any, path: Path) -> Any:
    with registry_of(ocp, CounterHandler, counter=OtherCounterHandler):
        ocp.save_checkpointables(path, {"counter": Counter(3), "another": Counter(4)})
    with registry_of(ocp, counter=OtherCounterHandler, another=CounterHandler):
        return [found.value for _, found in sorted(ocp.load_checkpointables(path).items())]


@case
def the_one_that_saved_loads(ocp: Any, path: Path) -> Any:
    with registry_of(ocp, CounterHandler):
        ocp.save_checkpointables(path, {"counter": Counter(3)})
    with registry_of(ocp, CounterHandler, OtherCounterHandler):
        return [
            ocp.load_checkpointables(path)["counter"].value,
            ocp.load_checkpointables(path, {"counter": AbstractCounter()})["counter"].value,
        ]


@case
def another_name_of_the_one_that_saved(ocp: Any, path: Path) -> Any:
    with registry_of(ocp, CounterHandler):
        ocp.save_checkpointables(path, {"counter": Counter(3)})

    class Renamed(CounterHandler):
        pass

    registry = ocp.handlers.local_registry()
    registry.add(Renamed, secondary_typestrs=[f"{CounterHandler.__module__}.CounterHandler"])
    registry.add(OtherCounterHandler)
    context = ocp.Context()
    context.checkpointables.registry = registry
    with context:
        return ocp.load_checkpointables(path)["counter"].value


@case
def the_one_that_saved_is_not_there(ocp: Any, path: Path) -> Any:
    with registry_of(ocp, CounterHandler):
        ocp.save_checkpointables(path, {"counter": Counter(3)})
    return ocp.load_checkpointables(path)


@case
def nobody_loads_what_is_asked_for(ocp: Any, path: Path) -> Any:
    with registry_of(ocp, CounterHandler):
        ocp.save_checkpointables(path, {"counter": Counter(3)})
        return ocp.load_checkpointables(path, {"counter": Counter(0)})


@case
def json_by_name(ocp: Any, path: Path) -> Any:
    with registry_of(ocp, config=ocp.handlers.JsonHandler):
        ocp.save_checkpointables(path, {"config": {"name": "x", "sizes": [1, 2.5, None, True], "at": (1, 2)}})
    return ocp.load_checkpointables(path)


@case
def what_is_json_and_a_state_is_a_state(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"config": {"name": "x"}})
    return ocp.load(path, checkpointable_name="config")


@case
def protocol_buffers(ocp: Any, path: Path) -> Any:
    from google.protobuf import struct_pb2

    message = struct_pb2.Struct()
    message.update({"name": "x", "sizes": [1, 2]})
    ocp.save_checkpointables(path, {"message": message, "model": state()})
    found = ocp.load_checkpointables(path, {"message": struct_pb2.Struct})["message"]
    return found == message, type(found).__name__


@case
def a_protocol_buffer_of_no_type(ocp: Any, path: Path) -> Any:
    from google.protobuf import struct_pb2

    ocp.save_checkpointables(path, {"message": struct_pb2.Struct()})
    return ocp.load_checkpointables(path)


@case
def what_saves_itself(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state(), "dataset": Iterator(9)})
    other = Iterator()
    found = ocp.load_checkpointables(path, {"dataset": other})
    return other.position, found["dataset"] is other


@case
def what_saves_itself_has_to_load_itself(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"model": state(), "dataset": Iterator(9)})
    return ocp.load_checkpointables(path)


@case
def what_saves_itself_under_the_name_of_states(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"state": Iterator(9)})
    other = Iterator()
    ocp.load_checkpointables(path, {"state": other})
    return other.position


@case
def metadata_of_what_saves_itself(ocp: Any, path: Path) -> Any:
    ocp.save_checkpointables(path, {"dataset": Iterator(9)})
    return ocp.checkpointables_metadata(path).metadata


def failing(phase: str, error: BaseException) -> Case:
    def run(ocp: Any, path: Path) -> Any:
        handler = type("Failing", (Failing,), {"phase": phase, "error": error})
        with registry_of(ocp, handler):
            # Alone: of a state beside it, what Orbax has begun would wait for its directory for minutes.
            ocp.save_checkpointables(path, {"counter": Counter(3)})
            return ocp.load_checkpointables(path)

    return run


for _phase in ("save", "save in the background", "load", "load in the background"):
    for _error in (
        ValueError("no"),
        RuntimeError("no"),
        KeyError("no"),
        OSError(28, "full"),
        TypeError("no"),
    ):
        CASES[f"{type(_error).__name__} in {_phase}"] = failing(_phase, _error)


@case
def metadata_that_fails(ocp: Any, path: Path) -> Any:
    handler = type("Failing", (Failing,), {"phase": "metadata"})
    with registry_of(ocp, handler):
        ocp.save_checkpointables(path, {"counter": Counter(3)})
        return ocp.checkpointables_metadata(path).metadata


# ---- registries --------------------------------------------------------------------------------


@case
def a_registry(ocp: Any, path: Path) -> Any:
    registry = ocp.handlers.local_registry(include_global_registry=False)
    registry.add(CounterHandler, secondary_typestrs=["a", "b"]).add(CounterHandler, checkpointable_name="x")
    copied = ocp.handlers.local_registry(registry, include_global_registry=False)
    return (
        list(copied.get_all_entries()) == [(CounterHandler, None), (CounterHandler, "x")],
        copied.has("x"),
        copied.has("y"),
        copied.get("x") is CounterHandler,
        list(copied.get_secondary_typestrs(CounterHandler)),
        list(copied.get_secondary_typestrs(OtherCounterHandler)),
    )


@case
def what_is_registered_from_the_start(ocp: Any, path: Path) -> Any:
    entries = ocp.handlers.global_registry().get_all_entries()
    return [(handler.__name__, name) for handler, name in entries[:6]]  # others may have registered more


@case
def a_type_twice(ocp: Any, path: Path) -> Any:
    ocp.handlers.local_registry().add(CounterHandler).add(CounterHandler)


@case
def a_name_twice(ocp: Any, path: Path) -> Any:
    registry = ocp.handlers.local_registry().add(CounterHandler, checkpointable_name="x")
    registry.add(OtherCounterHandler, checkpointable_name="x")


@case
def no_type(ocp: Any, path: Path) -> Any:
    ocp.handlers.local_registry().add(CounterHandler())


@case
def no_entry(ocp: Any, path: Path) -> Any:
    ocp.handlers.local_registry().get("x")


@case
def a_type_that_cannot_be_made(ocp: Any, path: Path) -> Any:
    class Demanding(CounterHandler):
        def __init__(self, needed: int) -> None:
            pass

    with registry_of(ocp, Demanding):
        ocp.save_checkpointables(path, {"counter": Counter(3)})
