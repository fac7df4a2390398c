"""Imports point downward only, and frameworks stay behind their layer.

The layers are those of ARCHITECTURE.md. The check reads the sources and imports nothing; an import inside
a function or under TYPE_CHECKING counts as any other.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "python" / "waystation"

# From the top down; those in one line may not import each other.
LAYERS: list[set[str]] = [
    {"__main__"},
    {"cli"},
    {"demo"},
    {"arrays", "multihost", "options", "partial", "path"},  # public modules, which no layer imports
    {"runtime"},
    {"memory"},
    {"training"},
    {"handlers"},
    {"checkpoint"},
    {"compat"},
    {"safetensors"},
    {"transfers"},
    {"layouts"},
    {"frameworks"},
    {"coordination"},
    {"tree", "grid"},
    {"_native"},
    {"_collection", "_distinct", "_extras", "_foreign", "_options", "_paths", "errors"},
    {"_forks"},
    {"_errors", "_processes"},
]
LEVELS = {name: len(LAYERS) - index for index, names in enumerate(LAYERS) for name in names}

# The demo is a program that uses the library, so it imports what programs import.
FRAMEWORK_LAYERS = {"frameworks", "coordination", "runtime", "demo"}
FRAMEWORKS = {"jax", "jaxlib", "torch", "flax", "optax"}


# Within the runtime, from the top down. The pure ones have no clock, threads, chance or I/O: time and what
# happens are told to them, so that they can be simulated.
PURE_RUNTIME_LAYERS = [
    "controller",
    "messages",
    "state_trees",
    "host_options",
    "exchange",
    "objects",
    "scheduling",
    "ir",
    "resources",
    "devices",
    "errors",
]
IMPURE_MODULES = {
    *(
        "asyncio",
        "concurrent",
        "ctypes",
        "jax",
        "jaxlib",
        "multiprocessing",
        "os",
        "pathlib",
        "random",
        "ray",
    ),
    *("secrets", "socket", "subprocess", "tempfile", "threading", "time", "torch", "uuid"),
}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything that a file imports; `from a import b` yields `a.b`."""
    package = ["waystation", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_imports_point_downward(path: Path) -> None:
    layer = layer_of(path)
    if path == PACKAGE / "__init__.py":
        return  # re-exports from every layer; tests/repository/test_top_level.py holds it to that
    assert layer in LEVELS, f"'{layer}' has no place in LAYERS: say which layer it is"
    wrong = []
    for line, module in imported_modules(path):
        root, _, rest = module.partition(".")
        target = rest.split(".")[0]
        if root != "waystation" or target == layer:
            continue
        if target not in LEVELS:
            # A name of the public API: only programs on top of the library may use its front door.
            if layer not in {"cli", "demo"}:
                wrong.append(f"line {line}: {module} is taken from the top; import it from its layer")
        elif LEVELS[target] >= LEVELS[layer]:
            wrong.append(f"line {line}: '{layer}' imports '{target}', which is not below it")
    assert not wrong, "\n".join([name_of(path), *wrong])


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_frameworks_stay_behind_their_layer(path: Path) -> None:
    roots = {module.split(".")[0] for _, module in imported_modules(path)}
    layer = layer_of(path)
    if layer not in FRAMEWORK_LAYERS:
        assert not roots & FRAMEWORKS, f"{name_of(path)} imports {sorted(roots & FRAMEWORKS)}"
    if layer != "runtime":
        assert "ray" not in roots, f"{name_of(path)} imports ray"


def test_the_picture_of_the_layers_is_drawn_from_these_sources() -> None:
    tool = Path(__file__).parents[2] / "tools" / "layers_diagram.py"
    done = subprocess.run(
        [sys.executable, tool, "--check"], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def pure_runtime_sources() -> list[Path]:
    roots = [PACKAGE / "runtime" / name for name in PURE_RUNTIME_LAYERS]
    return [
        path for root in roots for path in [root.with_suffix(".py"), *root.rglob("*.py")] if path.exists()
    ]


@pytest.mark.parametrize("path", pure_runtime_sources(), ids=name_of)
def test_what_the_runtime_decides_is_pure(path: Path) -> None:
    level = PURE_RUNTIME_LAYERS.index(path.relative_to(PACKAGE / "runtime").parts[0].removesuffix(".py"))
    wrong = []
    for line, module in imported_modules(path):
        parts = module.split(".")
        if parts[0] in IMPURE_MODULES:
            wrong.append(f"line {line}: {parts[0]} has effects, or depends on when it is asked")
        if parts[:2] == ["waystation", "runtime"] and parts[2] not in PURE_RUNTIME_LAYERS[level:]:
            wrong.append(f"line {line}: '{parts[2]}' is not below '{PURE_RUNTIME_LAYERS[level]}'")
    assert not wrong, "\n".join([name_of(path), *wrong])


def test_private_parts_of_jax_are_used_from_one_file() -> None:
    users = {
        name_of(path)
        for path in sources()
        for _, module in imported_modules(path)
        if module.startswith("jax._src") or module.split(".")[0] == "jaxlib"
    }
    assert len(users) <= 1, f"jax._src and jaxlib are imported by {sorted(users)}; keep them in one file"
