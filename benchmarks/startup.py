"""`python -m benchmarks.startup`: from the start of a process to what a model says; only loaders differ.

A small Llama runs on the CPU through transformers; its weights are brought by transformers itself, by other
libraries, by Waystation, and by code written for others whose import is changed (`startup_loaders.py`). With
`--server vllm` it runs in vLLM, whose loaders differ (`startup_vllm.py`).
Every start is a fresh process, with the model's files in the page cache (warm) and not (cold); the libraries
always are. The raw read limit is measured in the same rounds. Every process has to say the same tokens, and
in the first round its weights are compared byte for byte.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

from rich.console import Console

from benchmarks import command, measure, startup_report
from benchmarks.processes import ROOT, Outcome, spawn
from benchmarks.rounds import Case, Document, Results, Session
from benchmarks.startup_job import Request
from benchmarks.startup_model import EXPECTED, MODEL_DIRECTORY, RAW_DIRECTORY, SIZES
from benchmarks.startup_servers import SERVERS, TRANSFORMERS, Server
from benchmarks.systems.limit import Limit

EXPERIMENT = "startup"
CACHES = ("cold", "warm")
TOKENS = 128
SPARE_BYTES = 1 << 30  # what the libraries take
# The best from the disk and from the page cache.
LIMIT_WAYS = (
    "threads direct 1 MiB x4",
    "ring direct 4 MiB x1 depth 8",
    "threads buffered 1 MiB x4",
    "threads buffered 8 MiB x4",
)


def main() -> None:
    arguments = _parse()
    console = command.wide_console()
    startup_report.show(command.document_of(arguments, lambda: _measure(arguments, console)), console)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--server", choices=SERVERS, default=TRANSFORMERS, help="who runs the model")
    parser.add_argument(
        "--loaders", nargs="+", metavar="LOADER", help="who brings its weights (default: all)"
    )
    parser.add_argument("--size", choices=SIZES, help="of the model (default: half-gb, with --quick tiny)")
    parser.add_argument("--tokens", type=int, help=f"that are said (default: {TOKENS}, with --quick 8)")
    parser.add_argument("--repetitions", type=command.positive, help="rounds (default: 3, with --quick 1)")
    command.add_common_arguments(parser, timeout_s=300.0, timed="one start")
    arguments = command.parsed(parser, size=("half-gb", "tiny"), tokens=(TOKENS, 8), repetitions=(3, 1))
    if arguments.tokens < 2:
        parser.error("--tokens must be at least 2")
    known = SERVERS[arguments.server].loaders
    arguments.loaders = arguments.loaders or list(known)
    if unknown := set(arguments.loaders) - set(known):
        parser.error(f"{arguments.server} has no loader {min(unknown)!r}; it has {', '.join(known)}")
    return arguments


def _measure(arguments: argparse.Namespace, console: Console) -> Document:
    """Runs the rounds; returns the document, which is also kept."""
    command.say_without_ring(console)
    server = SERVERS[arguments.server]
    server.find_interpreter()  # which may say that there is none
    cases = cases_of(arguments.loaders, server)
    with command.measuring(
        arguments,
        EXPERIMENT if server.name == TRANSFORMERS else f"{EXPERIMENT}-{server.name}",
        console,
        Session,
        lambda _: len(cases) * arguments.repetitions,
        lambda document: startup_report.evaluate(Results(document)),
        startup_report.one_line,
        facts={"tokens": arguments.tokens, "server": server.name},
    ) as session:
        run(session, cases, arguments.size, arguments.tokens, arguments.repetitions)
    return session.document


def cases_of(loaders: list[str], server: Server = SERVERS[TRANSFORMERS]) -> list[Case]:
    """Everything that is measured in a round."""
    ways = [(name, way) for name in loaders for way in server.loaders[name].ways]
    ways += [(Limit.name, way) for way in LIMIT_WAYS]
    return [Case(EXPERIMENT, cache, name, way) for name, way in ways for cache in CACHES]


def run(session: Session, cases: list[Case], size: str, tokens: int, repetitions: int) -> None:
    """Writes the model and starts it in every way, round after round.

    Raises:
        SystemExit: The model cannot be written, such as without transformers, or does not start at all.
    """
    server = SERVERS[session.document.get("server", TRANSFORMERS)]
    directory = session.directory
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    writing = [sys.executable, "-m", "benchmarks.startup_model", str(directory), size, str(tokens)]
    written = subprocess.run(
        writing, cwd=ROOT, env=server.environment(directory), capture_output=True, text=True, check=False
    )
    if written.returncode:
        raise SystemExit(f"the model could not be written:\n{written.stderr[-2000:]}")
    learned = {} if server.teacher is None else _learn(session, server, server.teacher, tokens)
    session.document["model"] = {"size": size, **json.loads((directory / EXPECTED).read_text()), **learned}
    unavailable: dict[tuple[str, str], Outcome] = {}
    for repetition in range(repetitions):
        for case in in_turns(cases, repetition):
            outcome = unavailable.get((case.system, case.operation))
            if outcome is None:
                outcome = _start(session, server, case, tokens, verify=repetition == 0)
            if outcome["status"] == "missing":
                unavailable[case.system, case.operation] = outcome
            session.record(case, repetition, outcome)


def in_turns(cases: list[Case], repetition: int) -> Iterator[Case]:
    """The cases, beginning with others in each round."""
    first = repetition * len(cases) // 3 % len(cases)
    yield from cases[first:]
    yield from cases[:first]


def _learn(session: Session, server: Server, teacher: str, tokens: int) -> Document:
    """Starts the model once, and has what it says expected of all; with the versions that it ran in.

    Raises:
        SystemExit: It does not start.
    """
    outcome = _ask(session, server, teacher, server.loaders[teacher].ways[0], tokens, learn=True)
    if outcome["status"] != "ok":
        raise SystemExit(f"{server.name} does not start the model: {outcome['reason']}")
    path = session.directory / EXPECTED
    learned = {name: outcome[name] for name in ("tokens", "digest")}
    path.write_text(json.dumps({**json.loads(path.read_text()), **learned}))
    return {"versions": outcome["versions"]}


def _start(session: Session, server: Server, case: Case, tokens: int, *, verify: bool) -> Outcome:
    """One process; its outcome, or why there is none."""
    read = session.directory / (RAW_DIRECTORY if case.system == Limit.name else MODEL_DIRECTORY)
    if case.subject == "cold":
        measure.forget(read)
    else:
        measure.make_warm(read)
    measure.back_free_memory(session.document["model"]["bytes"] + SPARE_BYTES, quick=session.quick)
    cached_bytes = measure.cached_bytes(read)
    outcome = _ask(session, server, case.system, case.operation, tokens, verify=verify)
    return outcome if outcome["status"] != "ok" else {**outcome, "cached_bytes": cached_bytes}


def _ask(
    session: Session,
    server: Server,
    loader: str,
    way: str,
    tokens: int,
    *,
    verify: bool = False,
    learn: bool = False,
) -> Outcome:
    """Starts a process, which is asked for one start of the model, or for the limit."""
    directory = session.directory
    request = Request(
        loader=loader,
        way=way,
        directory=str(directory),
        output=session.output,
        tokens=tokens,
        verify=verify,
        server=server.name,
        learn=learn,
        started_s=time.monotonic(),
    )
    interpreter = sys.executable if loader == Limit.name else server.find_interpreter()
    environment = server.environment(directory)
    return spawn("benchmarks.startup_job", request, session.timeout_s, environment, interpreter)


if __name__ == "__main__":
    main()
