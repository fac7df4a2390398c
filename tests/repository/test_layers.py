"""Imports point downward only, and frameworks stay behind their layer.

The layers are those of ARCHITECTURE.md. The check reads the sources and imports nothing; an import inside
a function or under TYPE_CHECKING counts as any other.
"""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PYTHON = Path(__file__).parents[2] / "python"
PACKAGE = PYTHON / "waystation"

# From the top down; those in one line may not import each other. Names are those of modules and packages in
# `waystation`, and of the packages beside it.
LAYERS: list[set[str]] = [
    {"__main__"},
    {"cli"},
    {"view"},
    {"waystation_demo"},
    {"waystation_launch"},
    {"arrays", "multihost", "options", "partial", "path", "telemetry"},  # public, and no layer imports them
    {"integrations"},
    {"compat"},
    {"runtime"},
    {"memory"},
    {"training"},
    {"handlers"},
    {"checkpoint"},
    {"safetensors"},
    {"transfers"},
    {"layouts"},
    {"frameworks"},
    {"coordination"},
    {"tree", "grid"},
    {"storage"},
    {"_distinct"},
    {"_native"},
    {"_arguments", "_collection", "_extras", "_options", "_peers", "_plans", "errors"},
    {"_forks", "_launched", "_ports", "_threads"},
    {"_errors", "_processes"},
]
LEVELS = {name: len(LAYERS) - index for index, names in enumerate(LAYERS) for name in names}

# The demo is a program that uses the library, so it imports what programs import.
FRAMEWORK_LAYERS = {"frameworks", "coordination", "runtime", "integrations", "waystation_demo"}
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
    return sorted(PYTHON.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PYTHON).as_posix()


def layer_of(path: Path) -> str:
    root, *rest = path.relative_to(PYTHON).parts
    return rest[0].removesuffix(".py") if root == PACKAGE.name else root


def layer_named(module: str) -> str | None:
    """The layer of an absolute name; None if it is none of ours."""
    root, _, rest = module.partition(".")
    return rest.split(".")[0] if root == PACKAGE.name else root if root in LEVELS else None


@functools.cache
def imported_modules(path: Path) -> list[tuple[int, str]]:
    """Line and absolute name of everything that a file imports; `from a import b` yields `a.b`."""
    return list(_imported_modules(path))


def _imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    package = path.relative_to(PYTHON).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)


def test_imports_point_downward() -> None:
    # The front door re-exports from every layer; tests/repository/test_top_level.py holds it to that.
    paths = [path for path in sources() if path != PACKAGE / "__init__.py"]
    unplaced = {layer_of(path) for path in paths} - LEVELS.keys()
    assert not unplaced, f"these have no place in LAYERS, say which layer each is: {sorted(unplaced)}"
    wrong = []
    for path in paths:
        layer = layer_of(path)
        for line, module in imported_modules(path):
            target = layer_named(module)
            if target is None or target == layer:
                continue
            where = f"{name_of(path)}:{line}"
            if target not in LEVELS:
                # A name of the public API: only programs on top of the library may use its front door.
                if layer not in {"cli", "waystation_demo"}:
                    wrong.append(f"{where}: {module} is taken from the top; import it from its layer")
            elif LEVELS[target] >= LEVELS[layer]:
                wrong.append(f"{where}: '{layer}' imports '{target}', which is not below it")
    assert not wrong, "\n".join(wrong)


def test_frameworks_stay_behind_their_layer() -> None:
    wrong = []
    for path in sources():
        roots = {module.split(".")[0] for _, module in imported_modules(path)}
        layer = layer_of(path)
        if layer not in FRAMEWORK_LAYERS and roots & FRAMEWORKS:
            wrong.append(f"{name_of(path)} imports {sorted(roots & FRAMEWORKS)}")
        if layer != "runtime" and "ray" in roots:
            wrong.append(f"{name_of(path)} imports ray")
    assert not wrong, "\n".join(wrong)


def test_the_picture_of_the_layers_is_drawn_from_these_sources() -> None:
    tool = Path(__file__).parents[2] / "tools" / "layers_diagram.py"
    done = subprocess.run([sys.executable, tool, "--check"], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def pure_runtime_sources() -> list[Path]:
    roots = [PACKAGE / "runtime" / name for name in PURE_RUNTIME_LAYERS]
    return [
        path for root in roots for path in [root.with_suffix(".py"), *root.rglob("*.py")] if path.exists()
    ]


def test_what_the_runtime_decides_is_pure() -> None:
    wrong = []
    for path in pure_runtime_sources():
        level = PURE_RUNTIME_LAYERS.index(path.relative_to(PACKAGE / "runtime").parts[0].removesuffix(".py"))
        for line, module in imported_modules(path):
            where = f"{name_of(path)}:{line}"
            parts = module.split(".")
            if parts[0] in IMPURE_MODULES:
                wrong.append(f"{where}: {parts[0]} has effects, or depends on when it is asked")
            if parts[:2] == ["waystation", "runtime"] and parts[2] not in PURE_RUNTIME_LAYERS[level:]:
                wrong.append(f"{where}: '{parts[2]}' is not below '{PURE_RUNTIME_LAYERS[level]}'")
    assert not wrong, "\n".join(wrong)


def test_private_parts_of_jax_are_used_from_one_file() -> None:
    users = {
        name_of(path)
        for path in sources()
        for _, module in imported_modules(path)
        if module.startswith("jax._src") or module.split(".")[0] == "jaxlib"
    }
    assert len(users) <= 1, f"jax._src and jaxlib are imported by {sorted(users)}; keep them in one file"


# What is written down for others to implement, and what of the package these files may import from beside it.
PROTOCOLS: dict[str, tuple[str, set[str]]] = {
    "layouts/opened.py": ("waystation.layouts", set()),
    "frameworks/base.py": ("waystation.frameworks", {"waystation.frameworks.storage"}),
    "checkpoint/saving.py": ("waystation.layouts", {"waystation.layouts.native"}),
}
IMPLEMENTED_SAVES = {"native_saving", "orbax_saving", "local_saving", "partial_saving", "save"}


def test_protocols_know_no_implementation() -> None:
    wrong = []
    for name, (package, known) in PROTOCOLS.items():
        for line, module in imported_modules(PACKAGE / name):
            parts = module.split(".")
            is_below = module.startswith(f"{package}.") and not any(module.startswith(own) for own in known)
            if is_below or (name == "checkpoint/saving.py" and IMPLEMENTED_SAVES & set(parts)):
                wrong.append(f"{name}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_protocols_are_typed() -> None:
    wrong = []
    for name in PROTOCOLS:
        for node in ast.walk(ast.parse((PACKAGE / name).read_text())):
            if isinstance(node, ast.ClassDef) and "Protocol" in {ast.unparse(base) for base in node.bases}:
                text = ast.unparse(node).replace("NDArray[Any]", "")  # of any dtype
                if re.search(r"\bAny\b", text):
                    wrong.append(f"{name}: {node.name}")
    assert not wrong, f"these protocols have Any, behind which nothing is checked: {wrong}"


# Whatever asks the system about files, reads, writes or names them.
FILE_CALLS: dict[str, set[str]] = {
    "os": {
        *("access", "chmod", "close", "dup", "fdatasync", "fdopen", "fstat", "fsync", "ftruncate", "link"),
        *("listdir", "lstat", "makedirs", "mkdir", "open", "pread", "pwrite", "read", "readlink", "remove"),
        *("removedirs", "rename", "renames", "replace", "rmdir", "scandir", "stat", "statvfs", "symlink"),
        *("truncate", "unlink", "utime", "walk", "write"),
    },
    "os.path": {
        *("exists", "getmtime", "getsize", "isdir", "isfile", "islink", "ismount", "lexists", "realpath"),
        *("samefile", "samestat"),
    },
    "_native": {"Directory", "read_small_files", "rename_exchange", "rename_new"},
}
FILE_MODULES = {"fcntl", "shutil", "tempfile"}
PATH_METHODS = {
    *("chmod", "exists", "glob", "hardlink_to", "is_dir", "is_file", "is_symlink", "iterdir", "lstat"),
    *("mkdir", "read_bytes", "read_text", "rglob", "rmdir", "samefile", "symlink_to", "touch", "unlink"),
    *("write_bytes", "write_text"),
}

# Who else may, and why. Of checkpoints these hold nothing but what the last lines say, which shrink.
FILE_USERS = {
    "_ports.py": "which ports the system picks",
    "_processes.py": "processes, as the kernel shows them",
    "cli/arguments.py": "completes paths in a shell, which imports nothing",
    "cli/commands/agent.py": "the directory of an agent",
    "cli/commands/doctor.py": "what the kernel offers",
    "cli/commands/program_show.py": "programs of the runtime",
    "cli/findings.py": "what the kernel offers",
    "compat/fastsafetensors/common.py": "where a GPU is",
    "compat/fastsafetensors/config.py": "files of settings",
    "memory/agent.py": "the program of the agent",
    "memory/records.py": "records in the directory of an agent",
    "memory/recovering.py": "a log",
    "runtime": "logs, pipes, and directories of a cluster",
    "safetensors/torch_collective.py": "how much memory is free",
    # What still is to move.
    "compat/fastsafetensors/shard_files.py": "writes files through a mapping",
}


def _file_calls(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(), filename=str(path))
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            is_method = node.attr in PATH_METHODS and owner != "storage" and not owner.startswith("os")
            if node.attr in FILE_CALLS.get(owner, ()) or owner in FILE_MODULES or is_method:
                yield f"{name_of(path)}:{node.lineno}: {owner}.{node.attr}"
        elif isinstance(node, ast.Name) and node.id == "open" and "open" not in own:
            yield f"{name_of(path)}:{node.lineno}: open"


def test_only_storage_asks_the_system_about_files() -> None:
    wrong, users = [], set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        known = next((user for user in FILE_USERS if user == name or name.startswith(f"{user}/")), None)
        calls = [] if name.startswith("storage/") else list(_file_calls(path))
        if known is None:
            wrong += calls
        elif calls:
            users.add(known)
    assert not wrong, "these belong behind `waystation.storage`:\n" + "\n".join(wrong)
    assert users == FILE_USERS.keys(), f"these need no exception any more: {FILE_USERS.keys() - users}"


# ---- the same in Rust --------------------------------------------------------------------------

CRATES = Path(__file__).parents[2] / "crates"
LOCAL = "waystation-io/src/local"
# Modules and calls that ask the system about files, and methods of paths that do.
RUST_FILE_CALLS = re.compile(
    r"\bstd::fs\b|\bfs::\w+\(|\b(?:File|OpenOptions|DirBuilder)::|\bio_uring\b|\brustix::(?:fs|mm)\b"
    r"|\bstd::os::(?:fd|unix::fs)\b|\blibc::(?:close|copy_file_range|f?access|fallocate|f?chmod|fcntl|fd?atasync|fsync"
    r"|f?stat\w*|ftruncate|io_uring\w*|link\w*|lseek|mkdir\w*|mmap|msync|open\w*|p?(?:read|write)v?\w*|rename\w*"
    r"|statx|symlink\w*|sync\w*|unlink\w*)\("
    r"|\.(?:canonicalize|exists|is_dir|is_file|is_symlink|metadata|read_dir|read_link|symlink_metadata|try_exists)\(\)"
)
# Who else may, and why: checkpoints are not among it. This list only shrinks.
RUST_FILE_USERS = {
    "waystation-agent/src": "the store of the agent, on tmpfs, and its sockets",
    "waystation-io/src/aligned.rs": "memory without a file",
    "waystation-io/src/arena.rs": "how much memory there is",
    "waystation-io/src/cuda": "devices, their libraries, and the file that cuFile gets from `local`",
    "waystation-io/src/first_touch.rs": "how long a thread has waited for a processor",
    "waystation-io/src/throttle.rs": "the file by which benchmarks share a limit",
    "waystation-peers/src/secret.rs": "files of secrets",
    "waystation-peers/src/tls.rs": "files of certificates",
    "waystation-peers/src/halves.rs": "sockets",
    "waystation-python/src/directory.rs": "gives Python the descriptor of a directory",
    "waystation-store/src/cache.rs": "a cache of objects on this machine, which is no storage of checkpoints",
    "waystation-transport/src/memory.rs": "memory without a file",
}
# The engine knows one implementation of its storage by name, for what only that has.
RUST_LOCAL = re.compile(
    r"\b(?:crate|super)::(local|calibrate|directory|files|filesystem|probe|ring|sync_group)\b"
)
RUST_LOCAL_USERS = {
    "waystation-io/src/read/mod.rs": "the option that files are read straight to devices",
    "waystation-io/src/throttle.rs": "closes its file",
    "waystation-io/src/write/mod.rs": "the option that files are synced together",
}


def rust_sources() -> Iterator[tuple[str, str]]:
    """Names of the files of the crates, and their text without comments and tests."""
    test_module = re.compile(r"#\[cfg\(test\)\]\s+(?:#\[[^\]]*\]\s+)*(?:pub(?:\(\w+\))? )?mod (\w+)([;{ ]+)")
    for path in sorted(CRATES.glob("*/src/**/*.rs")):
        name = path.relative_to(CRATES).as_posix()
        parent = path.parent if path.name != "mod.rs" else path.parent.parent
        declared = [
            found[1]
            for above in (parent / "mod.rs", parent / "lib.rs", parent.with_suffix(".rs"))
            if above.exists()
            for found in test_module.finditer(above.read_text())
        ]
        if (path.stem if path.name != "mod.rs" else path.parent.name) in declared:
            continue
        text = path.read_text()
        own = next((found for found in test_module.finditer(text) if "{" in found[2]), None)
        yield name, re.sub(r"//[^\n]*", "", text[: own.start()] if own else text)


def _rust_users(
    pattern: re.Pattern[str], known: dict[str, str], crates: str = ""
) -> tuple[list[str], set[str]]:
    wrong, users = [], set()
    for name, text in rust_sources():
        if name.startswith(f"{LOCAL}/") or not name.startswith(crates):
            continue
        user = next((user for user in known if user == name or name.startswith(f"{user}/")), None)
        for found in pattern.finditer(text):
            if user is None:
                wrong.append(f"{name}:{text.count(chr(10), 0, found.start()) + 1}: {found[0]}")
            else:
                users.add(user)
    return wrong, known.keys() - users


def test_only_the_local_storage_asks_the_system_about_files_in_rust() -> None:
    wrong, unused = _rust_users(RUST_FILE_CALLS, RUST_FILE_USERS)
    assert not wrong, f"these belong behind `Storage`, in {LOCAL}:\n" + "\n".join(wrong)
    assert not unused, f"these need no exception any more: {unused}"


def test_the_engine_knows_its_storage_by_the_trait() -> None:
    wrong, unused = _rust_users(RUST_LOCAL, RUST_LOCAL_USERS, "waystation-io/")
    assert not wrong, "these go past the trait `Storage`:\n" + "\n".join(wrong)
    assert not unused, f"these need no exception any more: {unused}"
