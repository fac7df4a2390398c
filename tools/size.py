"""Prints how large the project is, and how much of it one must read to follow a call.

    python tools/size.py          # tables: packages, crates, journeys
    python tools/size.py --files  # also names the files of each journey

Code lines are those with code: no blank lines, comments or docstrings, and no tests of Rust. A public name is
a function, class or value that a module defines without an underscore (in Rust, a `pub` item); an exported
one is listed in an `__all__`. A journey is a real call: `sys.monitoring` notes each file of which a function
runs, in any thread of the process (from Python 3.12). Each call runs once before it is measured, so that
imports do not count.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALL_LINES = 60
TOKENS_WITHOUT_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
RUST_ITEM = re.compile(
    r"^\s*pub (?:(?:async|unsafe|const|extern \"C\") )*(?:fn|struct|enum|trait|type|static|const|mod) ", re.M
)
RUST_TESTS = re.compile(r"^#\[cfg\(test\)\]\nmod \w+ \{\n.*?^\}\n?", re.M | re.S)
# Strings and characters first: what looks like a comment in them is none.
RUST_COMMENT = re.compile(r'(r(#*)".*?"\2|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\')|//[^\n]*|/\*.*?\*/', re.S)


@dataclass
class Size:
    """What is counted of some files."""

    files: int = 0
    code_lines: int = 0
    public: int = 0
    exported: int = 0
    small: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass
class Module:
    """One file of Python.

    Attributes:
        path: Where it is.
        size: Its counts.
        imports: The modules of the project that it imports anywhere, by name.
        imports_first: Those among them that Python imports with the module itself.
    """

    path: Path
    size: Size
    imports: set[str] = field(default_factory=set)
    imports_first: set[str] = field(default_factory=set)


# Python ---------------------------------------------------------------------------------------------------


def python_modules(folder: Path) -> dict[str, Module]:
    """The modules below a folder by name."""
    paths = sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)
    names = {_module_name(folder, path): path for path in paths}
    found = {}
    for name, path in names.items():
        text = path.read_text()
        tree = ast.parse(text)
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        module = Module(path, _python_size(text, tree))
        for node, is_first in _imports(tree.body, True):
            targets = {_known(target, names) for target in _targets(node, package)} - {None, name}
            module.imports |= targets
            module.imports_first |= targets if is_first else set()
        found[name] = module
    return found


def _module_name(folder: Path, path: Path) -> str:
    return ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")


def _python_size(text: str, tree: ast.Module) -> Size:
    documented: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in TOKENS_WITHOUT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    names, exported = set(), 0
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined = {each.id for each in ast.walk(ast.Tuple(targets)) if isinstance(each, ast.Name)}
            names |= defined
            if "__all__" in defined and isinstance(node.value, ast.List | ast.Tuple):
                exported = len(node.value.elts)
    public = sum(not name.startswith("_") for name in names)
    return Size(1, len(lines - documented), public, exported, int(text.count("\n") < SMALL_LINES))


def _imports(body: Iterable[ast.AST], is_first: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Imports, and whether Python runs them when it imports the module."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, is_first
        else:
            is_later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
                isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            )
            yield from _imports(ast.iter_child_nodes(node), is_first and not is_later)


def _targets(node: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = package.split(".")[: 1 - node.level or None] if node.level else []
    prefix = ".".join([*base, *([node.module] if node.module else [])])
    return [f"{prefix}.{alias.name}" for alias in node.names]


def _known(target: str, names: Mapping[str, object]) -> str | None:
    """The module that an imported name is, or is in."""
    while target and target not in names:
        target = target.rpartition(".")[0]
    return target or None


def longest_chain(graph: Mapping[str, set[str]]) -> list[str]:
    """The longest way along the edges; of modules that import each other only one is counted."""
    group = _groups(graph)
    edges: dict[str, set[str]] = {name: set() for name in group.values()}
    for name, targets in graph.items():
        edges[group[name]] |= {group[target] for target in targets} - {group[name]}
    longest: dict[str, list[str]] = {}

    def chain(name: str) -> list[str]:
        if name not in longest:
            longest[name] = [
                name,
                *max((chain(target) for target in sorted(edges[name])), key=len, default=[]),
            ]
        return longest[name]

    return max((chain(name) for name in sorted(edges)), key=len, default=[])


def _groups(graph: Mapping[str, set[str]]) -> dict[str, str]:
    """For each node the first by name of those that it reaches and that reach it."""

    def reached(start: str) -> set[str]:
        found, waiting = {start}, [start]
        while waiting:
            new = graph[waiting.pop()] - found
            found |= new
            waiting.extend(new)
        return found

    below = {name: reached(name) for name in graph}
    return {name: min(other for other in below[name] if name in below[other]) for name in graph}


# Rust -----------------------------------------------------------------------------------------------------


def rust_size(folder: Path) -> Size:
    """The counts of the sources of a crate."""
    total = Size()
    for path in sorted(folder.rglob("*.rs")):
        if path.stem == "tests" or "tests" in path.relative_to(folder).parts:
            continue
        text = RUST_TESTS.sub("", path.read_text())
        code = RUST_COMMENT.sub(lambda found: found.group(1) or "\n" * found.group().count("\n"), text)
        lines = sum(not line.isspace() and line != "" for line in code.split("\n"))
        total += Size(1, lines, len(RUST_ITEM.findall(code)), 0, int(text.count("\n") < SMALL_LINES))
    return total


def crate_graph(crates: Path) -> dict[str, set[str]]:
    """What each crate of the project needs of the others."""
    needs = {}
    for manifest in sorted(crates.glob("*/Cargo.toml")):
        dependencies = manifest.read_text().partition("\n[dependencies]")[2].partition("\n[")[0]
        needs[manifest.parent.name] = set(re.findall(r"^([\w-]+)", dependencies, re.M))
    return {name: found & needs.keys() for name, found in needs.items()}


# Journeys -------------------------------------------------------------------------------------------------


def files_passed(call: Callable[[], object], folder: Path) -> list[str]:
    """The files below a folder of which a function runs during the call, in any thread."""
    monitoring, seen = sys.monitoring, set()

    def started(code: object, _offset: int) -> object:
        if code.co_name != "<module>":  # type: ignore[attr-defined]
            seen.add(code.co_filename)  # type: ignore[attr-defined]
        return monitoring.DISABLE

    monitoring.use_tool_id(monitoring.PROFILER_ID, "size")
    try:
        monitoring.register_callback(monitoring.PROFILER_ID, monitoring.events.PY_START, started)
        monitoring.set_events(monitoring.PROFILER_ID, monitoring.events.PY_START)
        call()
    finally:
        monitoring.set_events(monitoring.PROFILER_ID, monitoring.events.NO_EVENTS)
        monitoring.free_tool_id(monitoring.PROFILER_ID)
    passed = map(Path, list(seen))
    return sorted(str(path.relative_to(folder)) for path in passed if path.is_relative_to(folder))


def save_and_load(place: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """A save and a load of a small state of JAX."""
    import jax.numpy as jnp

    import waystation

    state = {"weights": jnp.arange(1000.0), "step": 3}
    waystation.save(place / "warm", state)
    yield "a save", lambda: waystation.save(place / "step", state)
    waystation.load(place / "warm")
    yield "a load", lambda: waystation.load(place / "step")


def recovery(place: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """A program that loads from the memory tier what an earlier one saved there."""
    import numpy as np

    from waystation.memory import MemoryTier
    from waystation.training import Checkpointer, save_decision_policies
    from waystation_launch.host_agent import HostAgent

    agent = HostAgent(place / "agent", "64MiB", 2, 1, 0, lambda text: None)
    agent.start()
    assert agent.process_id is not None
    tier = MemoryTier(directory=place / "agent")
    never = save_decision_policies.SpecificStepsPolicy(())
    try:
        with Checkpointer(place / "run", save_decision_policy=never, memory=tier) as checkpointer:
            checkpointer.save(1, {"weights": np.arange(1000.0), "step": 1})

        def recover() -> None:
            with Checkpointer(place / "run", save_decision_policy=never, memory=tier) as checkpointer:
                assert checkpointer.load()["step"] == 1

        recover()
        yield "a recovery from memory", recover
    finally:
        os.kill(agent.process_id, signal.SIGTERM)


def runtime_call(place: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """A call of the runtime on one device of this process."""
    import numpy as np

    from waystation import runtime

    with runtime.local({"island": 1}) as client:
        double = client.jit(lambda x: 2 * x, client.make_virtual_device_set().add_slice(devices=1))
        double(np.ones(4, np.float32)).numpy()
        yield "a runtime call", lambda: double(np.ones(4, np.float32)).numpy()


def trace() -> None:
    """Makes the journeys, and prints the files of each as JSON."""
    found = {}
    for journeys in (save_and_load, recovery, runtime_call):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
            for name, call in journeys(Path(place)):
                found[name] = files_passed(call, ROOT / "python")
    print(json.dumps(found))


def traced() -> dict[str, list[str]]:
    """The files of each journey, made by a process of its own."""
    command = [sys.executable, __file__, "--trace"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


# Printing -------------------------------------------------------------------------------------------------


def print_table(title: str, sizes: Mapping[str, Size]) -> None:
    """Prints a row for each name, and their sum."""
    columns = ["files", "code lines", "public", "exported", f"< {SMALL_LINES} lines"]
    print(f"{title:<24}" + "".join(f"{column:>12}" for column in columns))
    for name, size in [*sizes.items(), ("all", sum(sizes.values(), Size()))]:
        numbers = [size.files, size.code_lines, size.public, size.exported, size.small]
        print(f"{name:<24}" + "".join(f"{number:>12}" for number in numbers))
    print()


def print_journeys(journeys: Mapping[str, list[str]], *, with_files: bool) -> None:
    """Prints how many files each journey passes through."""
    print(f"{'journey':<24}{'files':>12}")
    for name, passed in journeys.items():
        print(f"{name:<24}{len(passed):>12}")
        for file in passed if with_files else []:
            print(f"    {file}")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description="Prints how large the project is.")
    parser.add_argument("--files", action="store_true", help="name the files of each journey")
    parser.add_argument("--no-calls", action="store_true", help="count only, make no calls")
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trace:
        trace()
        return
    modules = python_modules(ROOT / "python")
    sizes: dict[str, Size] = {}
    for module in modules.values():
        root, *rest = module.path.relative_to(ROOT / "python").parts
        name = rest[0] if root == "waystation" and len(rest) > 1 else root
        sizes[name] = sizes.get(name, Size()) + module.size
    print_table("Python", sizes)
    crates = sorted((ROOT / "crates").glob("*/src"))
    print_table("Rust", {folder.parent.name: rust_size(folder) for folder in crates})
    importers: dict[str, int] = dict.fromkeys(modules, 0)
    for module in modules.values():
        for target in module.imports:
            importers[target] += 1
    alone = sum(count == 1 and modules[name].path.name != "__init__.py" for name, count in importers.items())
    print(f"{alone} modules of Python have one importer\n")
    is_traced = sys.version_info >= (3, 12) and not arguments.no_calls
    journeys = {
        "longest Python imports": longest_chain({name: each.imports_first for name, each in modules.items()}),
        "longest Rust imports": longest_chain(crate_graph(ROOT / "crates")),
    }
    print_journeys(journeys | (traced() if is_traced else {}), with_files=arguments.files)


if __name__ == "__main__":
    main()
