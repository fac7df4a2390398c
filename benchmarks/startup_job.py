"""One start of a model, from the beginning of its process to its last token, in this process alone.

`python -m benchmarks.startup_job REQUEST`, where REQUEST is a JSON object (see `Request`). Times are counted
from the moment at which the process was started, which the request tells by a clock that all processes share.
After the last token the clock has stopped: then what was said is compared with what was expected, and every
weight, if that is asked for. A start that is to *learn* says what the others are compared with.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import waystation
from benchmarks import measure, processes, startup_model
from benchmarks.processes import Outcome
from benchmarks.startup_loaders import Clock
from benchmarks.startup_servers import SERVERS, TRANSFORMERS
from benchmarks.systems.limit import Limit, check_pages


@dataclass(frozen=True, slots=True)
class Request(processes.Request):
    """What a process is asked to do.

    Attributes:
        loader: Of the server; or the raw limit, which reads as many bytes and says nothing.
        way: One of its manners.
        directory: What `startup_model` has written to.
        tokens: How many are said.
        started_s: When the process was started, by `time.monotonic`.
        verify: Whether all weights are compared.
        server: Who runs the model.
        learn: Whether the outcome is what was said, and the digest of the weights, instead of figures.
    """

    loader: str
    way: str
    directory: str
    tokens: int
    started_s: float
    verify: bool = False
    server: str = TRANSFORMERS
    learn: bool = False


def run(request: Request) -> Outcome:
    """Measures what is asked for."""
    return read_raw(request) if request.loader == Limit.name else start(request)


def start(request: Request) -> Outcome:
    """Starts the model; returns when each stage was reached."""
    clock, directory = Clock(request.started_s), Path(request.directory)
    server = SERVERS[request.server]
    loader, marks = server.loaders[request.loader], clock.marks
    make = loader.prepare(request.way)
    clock.mark("imported")
    model = make(directory / startup_model.MODEL_DIRECTORY, clock)
    if "loaded" not in marks:
        clock.mark("loaded")
    said = server.say(model, request.tokens, lambda: clock.mark("last" if "first" in marks else "first"))
    if request.learn:
        versions = {name: str(sys.modules[name].__version__) for name in (server.name, "torch")}
        return {"status": "ok", "tokens": said, "digest": server.digest(model), "versions": versions}
    expected = json.loads((directory / startup_model.EXPECTED).read_text())
    _check_said(said, expected["tokens"][: request.tokens])
    if request.verify and server.digest(model) != expected["digest"]:
        raise ValueError("the weights are not those that were saved")
    traffic = measure.disk_traffic()
    return {
        "status": "ok",
        "version": _version(loader.distribution),
        "state_bytes": expected["bytes"],
        **{f"{name}_s": at for name, at in marks.items()},
        "load_s": marks["loaded"] - marks.get("skeleton", marks["imported"]),
        "imported_to_first_s": marks["first"] - marks["imported"],
        "token_s": (marks["last"] - marks["first"]) / (request.tokens - 1),
        "disk_read_bytes": traffic["read"] if traffic else None,
    }


def _version(distribution: str) -> str:
    # Environments of other servers have Waystation on their path, not installed.
    return waystation.__version__ if distribution == "waystation" else metadata.version(distribution)


def _check_said(said: list[int], expected: list[int]) -> None:
    if len(said) != len(expected):
        raise ValueError(f"{len(said)} tokens were said, not {len(expected)}")
    for number, (token, wanted) in enumerate(zip(said, expected, strict=True), 1):
        if token != wanted:
            raise ValueError(f"token {number} is {token}, not {wanted}")


def read_raw(request: Request) -> Outcome:
    """Reads the file of the limit into memory that nothing has touched."""
    directory = Path(request.directory)
    expected = json.loads((directory / startup_model.EXPECTED).read_text())
    limit = Limit()
    limit.prepare(request.way)
    nbytes = limit.template(startup_model.raw_leaves(expected["bytes"]))
    began_s = time.monotonic()
    loaded = limit.load(directory / startup_model.RAW_DIRECTORY, nbytes)
    load_s = time.monotonic() - began_s
    if isinstance(loaded, float):
        load_s = loaded
    elif not check_pages(limit.views(loaded)["raw"]):
        raise ValueError("a page of the raw file is not what was written")
    return {"status": "ok", "state_bytes": nbytes, "load_s": load_s}


if __name__ == "__main__":
    processes.answer(Request, run)
