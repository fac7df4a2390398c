"""A Python that has imported what a program begins with, and waits to become the program.

`waystation launch` starts it by the path of this file, with the interpreter and the options of the program,
and with its environment and directory:

    python OPTIONS standby.py CONTROL REQUEST python OPTIONS script.py ARGUMENTS

What it imports is what the program would do first: it reads, without running anything, with which imports of
installed packages and of the standard library the sources of the program begin, and carries these out in the
same order (`Beginning`). It stops where anything else is done that could change what an import does. Then it
imports what the program had imported later of these same packages.

What can go wrong, in order: the sources cannot be read or an import fails (it ends, with a traceback on
stderr); a module of the program itself is imported along (it ends); the launch ends (it ends); the program is
started, and its sources or an imported file have changed since (it says so and ends). In all these cases the
launch starts a fresh process. Invariants: no statement of the program's own files is run before the launch
says so, but imports and constant variables of the environment; the program then finds what a fresh
interpreter would have: arguments, path, `__main__`, priority, descriptors, environment.

It uses the standard library only, since the interpreter of the program need not have this package.
"""

_AT_START = {name: value for name, value in globals().items() if not name.startswith("__c")}
_MODULES_AT_START = frozenset(__import__("sys").modules)
_OWN_FILE = __file__

import _thread  # noqa: E402
import ast  # noqa: E402
import builtins  # noqa: E402
import contextlib  # noqa: E402
import ctypes  # noqa: E402
import functools  # noqa: E402
import hashlib  # noqa: E402
import importlib  # noqa: E402
import importlib.machinery  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import runpy  # noqa: E402
import site  # noqa: E402
import sys  # noqa: E402
import sysconfig  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from types import ModuleType  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

# Beside a program that uses all processors this still is a tenth of one.
_LOW_PRIORITY = 10
_FIRST_TO_KILL = 1000  # for the killer of the kernel, where memory is short
_INSTALLED = {"site-packages", "dist-packages"}

# What a statement may call while it is passed over: nothing that changes what a later import does.
_HARMLESS_CALLS = {
    *("NewType", "ParamSpec", "TypeVar", "TypeVarTuple", "abstractmethod", "cache", "classmethod"),
    *("contextmanager", "dataclass", "dict", "field", "final", "float", "frozenset", "getLogger", "int"),
    *("jit", "len", "list", "lru_cache", "namedtuple", "overload", "override", "partial", "property"),
    *("range", "set", "staticmethod", "str", "tuple", "wraps", "Path"),
}
_HARMLESS = (
    *(ast.Constant, ast.Name, ast.Attribute, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.BinOp, ast.UnaryOp),
    *(ast.BoolOp, ast.Compare, ast.Subscript, ast.Slice, ast.Starred, ast.JoinedStr, ast.FormattedValue),
    *(ast.Lambda, ast.arguments, ast.arg, ast.keyword, ast.Call, ast.expr_context, ast.operator),
    *(ast.unaryop, ast.boolop, ast.cmpop),
)


class Program(NamedTuple):
    """What the standby is to become.

    Attributes:
        words: The command: interpreter, options, program, arguments.
        place: Where in it the program's arguments begin; of a script with its path.
        module: The module after `-m`; None for a script.
    """

    words: list[str]
    place: int
    module: str | None

    @property
    def script(self) -> str:
        """The path of the script, as the interpreter puts it together."""
        return os.path.join(os.getcwd(), self.words[self.place])

    @property
    def first_path(self) -> str:
        """What the interpreter puts at the beginning of `sys.path`."""
        return os.getcwd() if self.module is not None else os.path.dirname(os.path.realpath(self.script))

    @property
    def arguments(self) -> list[str]:
        """`sys.argv`, as it is when the program is looked for."""
        rest = self.words[self.place :]
        return rest if self.module is None else ["-m", *rest]


# ---- what a program begins with ------------------------------------------------------------------


class Step(NamedTuple):
    """A statement that the program carries out before anything else.

    Attributes:
        module: The name of the module that it is in.
        path: Its file.
        text: The statement.
        node: Its syntax; what is the same text is the same step.
    """

    module: str
    path: str
    text: str
    node: ast.stmt


class Beginning:
    """The imports of installed modules with which the sources of a program begin.

    Modules of the program itself are followed in the place where they are imported, and not run. Passed over
    is what cannot change what an import does: definitions, constants, what is for type checkers. Whatever
    else comes is the end.

    Args:
        program: The program.

    Attributes:
        steps: The statements, in the order in which the program carries them out.
        main_path: The file of `__main__`.
    """

    def __init__(self, program: Program) -> None:
        self.steps: list[Step] = []
        self.main_path = "" if program.module is not None else program.script
        self._seen: set[str] = set()
        self._own = (program.module or "").partition(".")[0]  # also where it is installed
        self._library = library_directories()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the program has them shown itself
            if program.module is None:
                self._read(program.script, "__main__", "")
            else:
                self._read_main(program.module)

    @property
    def texts(self) -> list[tuple[str, str, str]]:
        """The steps, to be compared."""
        return [(step.module, step.path, step.text) for step in self.steps]

    def is_library(self, top: str) -> bool:
        """Whether a top-level module is installed, or of the standard library."""
        spec = None if top == self._own else _top_level(top)
        return spec is not None and self._is_installed(spec)

    def _is_installed(self, spec: importlib.machinery.ModuleSpec) -> bool:
        if not spec.has_location:
            return spec.origin in {"built-in", "frozen"}
        return spec.origin is not None and is_under(spec.origin, self._library)

    def _read_main(self, module: str) -> None:
        """Reads what `python -m` runs: the packages around the module, then the module or its `__main__`."""
        found = self._find(module)
        if found is None:
            return
        is_package = os.path.basename(found) == "__init__.py"
        around = module if is_package else module.rpartition(".")[0]
        main = os.path.join(os.path.dirname(found), "__main__.py") if is_package else found
        self.main_path = main
        if not around or self._follow(around):
            self._read(main, "__main__", around)

    def _read(self, path: str, module: str, package: str) -> bool:
        """Reads one file of the program; returns whether all of it was understood."""
        if not path.endswith(".py") and module != "__main__":
            return False
        tree = ast.parse(Path(path).read_bytes(), path)
        return all(self._take(node, path, module, package) for node in tree.body)

    def _take(self, node: ast.stmt, path: str, module: str, package: str) -> bool:
        if isinstance(node, ast.Import):
            return all(self._import(node, alias, path, module) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            return self._import_from(node, path, module, package)
        if _sets_constant_variable(node) or self._is_attempt(node):
            self._add(node, node, path, module)
            return True
        return _is_harmless(node, module)

    def _add(self, node: ast.stmt, of: ast.stmt, path: str, module: str) -> None:
        placed = ast.fix_missing_locations(ast.copy_location(node, of))
        self.steps.append(Step(module, path, ast.unparse(node), placed))

    def _import(self, node: ast.Import, alias: ast.alias, path: str, module: str) -> bool:
        if self.is_library(alias.name.partition(".")[0]):
            self._add(ast.Import([alias]), node, path, module)
            return True
        return self._follow(alias.name)

    def _import_from(self, node: ast.ImportFrom, path: str, module: str, package: str) -> bool:
        if not node.level and node.module == "__future__":
            return True
        if not node.level and self.is_library((node.module or "").partition(".")[0]):
            self._add(node, node, path, module)
            return True
        base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        name = ".".join([*base, *([node.module] if node.module else [])])
        if not name or not self._follow(name):
            return False
        inner = [f"{name}.{alias.name}" for alias in node.names]
        return all(self._find(each) is None or self._follow(each) for each in inner)

    def _is_attempt(self, node: ast.stmt) -> bool:
        """Whether it tries to import what may not be installed, and does nothing else."""
        if not isinstance(node, ast.Try):
            return False
        inner = [*node.body, *(each for handler in node.handlers for each in handler.body), *node.orelse]
        return not node.finalbody and all(self._is_import(each) or _is_harmless(each) for each in inner)

    def _is_import(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Import):
            tops = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            tops = [(node.module or "").partition(".")[0]]
        else:
            return False
        return all(self.is_library(top) or _top_level(top) is None for top in tops)

    def _follow(self, name: str) -> bool:
        """Reads a module of the program and the packages around it; returns whether all was understood."""
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            inner = ".".join(parts[:count])
            if inner in self._seen:
                continue
            self._seen.add(inner)
            path = self._find(inner)
            if path is None:
                return False
            is_package = os.path.basename(path) == "__init__.py"
            if not self._read(path, inner, inner if is_package else inner.rpartition(".")[0]):
                return False
        return True

    def _find(self, name: str) -> str | None:
        """The file of a module of the program; None if there is none, such as of a namespace package."""
        top, *rest = name.split(".")
        spec = _top_level(top)
        for part in rest:
            if spec is None or not spec.submodule_search_locations:
                return None
            places = list(spec.submodule_search_locations)
            spec = importlib.machinery.PathFinder.find_spec(part, places)
        return spec.origin if spec is not None and spec.has_location else None


def _top_level(name: str) -> importlib.machinery.ModuleSpec | None:
    """Where a top-level module would be imported from, whether or not it has been."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if name and find is not None and (spec := find(name, None, None)) is not None:
            found: importlib.machinery.ModuleSpec = spec
            return found
    return None


def library_directories() -> list[str]:
    """Where installed packages and the standard library are, and the package that saves to the agent."""
    paths = sysconfig.get_paths()
    found = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    found += [*site.getsitepackages(), site.getusersitepackages()]
    found += [path for path in sys.path if os.path.basename(path) in _INSTALLED]
    found.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(_OWN_FILE))), "waystation"))
    return [f"{os.path.realpath(path)}{os.sep}" for path in found]


@functools.cache
def _real(directory: str) -> str:
    return f"{os.path.realpath(directory)}{os.sep}"


def is_under(path: str, directories: list[str]) -> bool:
    """Whether a file is in one of these directories, or beneath one."""
    return _real(os.path.dirname(path)).startswith(tuple(directories))


def _sets_constant_variable(node: ast.stmt) -> bool:
    """Whether it sets a variable of the environment to what stands there."""
    match node:
        case ast.Assign(
            targets=[ast.Subscript(value=variables, slice=ast.Constant(value=str()))],
            value=ast.Constant(value=str()),
        ):
            pass
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=variables, attr="setdefault"),
                args=[ast.Constant(value=str()), ast.Constant(value=str())],
                keywords=[],
            )
        ):
            pass
        case _:
            return False
    return ast.unparse(variables) == "os.environ"


def _is_harmless(node: ast.stmt, module: str = "__main__") -> bool:
    """Whether a statement cannot change what an import after it does, so that it may come after it."""
    match node:
        case ast.Pass() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(targets=targets, value=value):
            return all(isinstance(target, ast.Name) for target in targets) and _is_quiet(value)
        case ast.AnnAssign(target=ast.Name(), value=value):
            return value is None or _is_quiet(value)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            return all(map(_is_quiet, [*node.decorator_list, *defaults])) and _are_named(node.decorator_list)
        case ast.ClassDef():
            outer = [*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)]
            is_quiet = all(map(_is_quiet, outer)) and _are_named(node.decorator_list)
            return is_quiet and all(_is_harmless(each, module) for each in node.body)
        case ast.If(test=test, orelse=[]):
            never = ["TYPE_CHECKING", "typing.TYPE_CHECKING"]
            if module != "__main__":
                never += ["__name__ == '__main__'"]
            return ast.unparse(test) in never
        case _:
            return False


def _is_quiet(value: ast.expr) -> bool:
    """Whether an expression only looks up and puts together."""
    for node in ast.walk(value):
        if not isinstance(node, _HARMLESS) or (isinstance(node, ast.Attribute) and node.attr == "environ"):
            return False
        if isinstance(node, ast.Call) and not _are_named([node.func]):
            return False
    return True


def _are_named(called: list[ast.expr]) -> bool:
    """Whether all that is called is known not to change anything."""
    names = [each.func if isinstance(each, ast.Call) else each for each in called]
    return all(
        (each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "")) in _HARMLESS_CALLS
        for each in names
    )


# ---- to prepare ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _at_low_priority() -> Iterator[None]:
    """Leaves the processors to the program, where the priority can be had back afterwards."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    if not _can_return_to(before):
        yield
        return
    os.setpriority(os.PRIO_PROCESS, 0, _LOW_PRIORITY)
    yield
    for thread in os.listdir("/proc/self/task"):  # those that imports have started have taken it over
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread), before)


def _can_return_to(priority: int) -> bool:
    """Whether this process may raise its priority; a thread tries, since on Linux each has its own."""
    found: list[bool] = []
    ended = _thread.allocate_lock()
    ended.acquire()

    def attempt() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _LOW_PRIORITY)
            os.setpriority(os.PRIO_PROCESS, 0, priority)
            found.append(True)
        ended.release()

    _thread.start_new_thread(attempt, ())
    ended.acquire()
    return bool(found)


def _run(steps: list[Step]) -> None:
    """Carries out the imports, each module's in a namespace for all of them."""
    namespaces: dict[str, dict[str, Any]] = {}
    for step in steps:
        new = {"__name__": step.module, "__file__": step.path, "__builtins__": builtins}
        namespace = namespaces.setdefault(step.module, new)
        # Not more than the program does by itself in the end.
        exec(compile(ast.Module([step.node], []), step.path, "exec", dont_inherit=True), namespace)  # noqa: S102


def _import_more(names: list[str], environment: str, beginning: Beginning) -> bool:
    """Imports what the program imported later of the packages that have been imported already.

    Returns:
        Whether the environment is that of the program by then. Otherwise the program has changed it itself,
        and maybe for what it imported afterwards.
    """
    begun = {name.partition(".")[0] for name in sys.modules}
    wanted = {top for top in begun if top != "__main__" and beginning.is_library(top)}
    for name in names:
        if name not in sys.modules and name.partition(".")[0] in wanted:
            importlib.import_module(name)
    return not names or environment == digest_of_environment()


def digest_of_environment() -> str:
    """What tells two sets of variables apart; `waystation._launched` makes the same."""
    told = b"\0".join(b"%s=%s" % each for each in sorted(os.environb.items()))
    return hashlib.sha256(told).hexdigest()


def imported_files() -> dict[str, tuple[int, int, int]]:
    """The files of all modules that were imported, and what tells a changed one."""
    found = {}
    for module in list(sys.modules.values()):
        spec = _spec_of(module)
        if spec is not None and spec.has_location and spec.origin is not None:
            found[spec.origin] = _identity(spec.origin)
    return found


def _spec_of(module: object) -> importlib.machinery.ModuleSpec | None:
    """Asks no module that makes its attributes when it is asked, and takes what is none."""
    return module.__dict__.get("__spec__") if isinstance(module, ModuleType) else None


def _identity(path: str) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except OSError:  # such as within an archive
        return (0, 0, 0)
    return status.st_ino, status.st_size, status.st_mtime_ns


def refuse_own_modules(program: Program) -> None:
    """Raises if a module of the program was imported, or would have been in the place of another one."""
    library, own = library_directories(), (program.module or "").partition(".")[0]
    for name, module in list(sys.modules.items()):
        spec = _spec_of(module)
        if spec is None or not spec.has_location or spec.origin is None:
            continue
        if name.partition(".")[0] == own or not is_under(spec.origin, library):
            raise ImportError(f"'{name}' is a module of the program: '{spec.origin}'")
    if sys.flags.safe_path:
        return
    for top in {name.partition(".")[0] for name in sys.modules.keys() - _MODULES_AT_START}:
        spec = importlib.machinery.PathFinder.find_spec(top, [program.first_path])
        if spec is not None and spec.loader is not None and not is_under(spec.origin or "", library):
            raise ImportError(f"'{spec.origin}' has the name of the installed module '{top}'")


# ---- to become the program -----------------------------------------------------------------------


class Control:
    """The connection to the launch: one JSON document a line."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._begun = b""

    def say(self, **what: Any) -> None:
        """Sends a line."""
        os.write(self._descriptor, json.dumps(what).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        """Waits for a line; ends the process if the launch has closed the connection."""
        while b"\n" not in self._begun:
            data = os.read(self._descriptor, 1 << 16)
            if not data:
                os._exit(0)  # at once: nobody has used what was imported
            self._begun += data
        line, _, self._begun = self._begun.partition(b"\n")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def close(self) -> None:
        """Ends it."""
        os.close(self._descriptor)


class OutOfMemoryOrder:
    """Has the kernel end a standby before the program where memory is short, until it is the program."""

    _PATH = "/proc/self/oom_score_adj"

    def __init__(self) -> None:
        self._before = ""
        with contextlib.suppress(OSError):
            before = Path(self._PATH).read_text()
            Path(self._PATH).write_text(str(_FIRST_TO_KILL))
            self._before = before

    def reset(self) -> None:
        """Becomes like other processes again.

        Raises:
            OSError: The system does not let it.
        """
        if self._before:
            Path(self._PATH).write_text(self._before)


def _rename(words: list[str]) -> None:
    """Has `ps` show the command of the program."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])
        text = b"".join(os.fsencode(word) + b"\0" for word in words)
        if 0 < len(text) <= end - begin:
            ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


class _CompilerFlags(ctypes.Structure):
    """`PyCompilerFlags`, as it is for the main program."""

    _fields_ = (("flags", ctypes.c_int), ("feature_version", ctypes.c_int))


def _script_runner(path: str) -> Callable[[], int]:
    """Runs a script as the interpreter itself does, which shows errors and ends the process on SystemExit."""
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    libc.fopen.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    opened = libc.fopen(os.fsencode(path), b"rb")
    if not opened:
        raise OSError(f"'{path}' cannot be opened")
    run = ctypes.pythonapi.PyRun_SimpleFileExFlags
    run.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(_CompilerFlags)]
    run.restype = ctypes.c_int
    flags = ctypes.pointer(_CompilerFlags(0, sys.version_info.minor))
    return functools.partial(run, opened, os.fsencode(path), 1, flags)


def _module_runner(module: str) -> Callable[[], int]:
    """Runs a module as `python -m` does, by the same function of the standard library."""
    run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
    system, own = sys, _OWN_FILE
    evaluate = ctypes.pythonapi.PyRun_SimpleString

    def run_module() -> int:
        try:
            run(module)
        except SystemExit:
            raise
        except BaseException as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename == own:
                trace = trace.tb_next
            error.__traceback__ = trace
            system.last_type, system.last_value, system.last_traceback = type(error), error, trace
            system.last_exc = error  # type: ignore[attr-defined,unused-ignore]
            system.excepthook(type(error), error, trace)
            if isinstance(error, KeyboardInterrupt):  # has the interpreter end itself by SIGINT afterwards
                system.excepthook = lambda *_: None
                evaluate(b"raise KeyboardInterrupt")
            return -1
        return 0

    return run_module


def main() -> Callable[[], int]:
    """Prepares, waits, and returns what runs the program, which has `__main__` for itself by then."""
    control, request = Control(int(sys.argv[1])), int(sys.argv[2])
    os.set_inheritable(int(sys.argv[1]), False)
    with open(request, "rb") as file:
        told = json.load(file)
    program = Program(sys.argv[3:], told["place"], told["module"])
    order = OutOfMemoryOrder()
    _look_like(program)
    with _at_low_priority():
        beginning = Beginning(program)
        _show_main(program, beginning.main_path)
        _run(beginning.steps)
        is_alike = _import_more(told["modules"], told["environment"], beginning)
    if not is_alike:
        control.say(is_ready=False)
        os._exit(0)
    refuse_own_modules(program)
    files = imported_files()
    control.say(is_ready=True, imported=len(files))
    changes = control.hear()["environment"]
    try:
        _check(program, beginning, files)
        order.reset()
        run = _script_runner(program.script) if program.module is None else _module_runner(program.module)
    except Exception as error:
        control.say(is_valid=False, why=f"{type(error).__name__}: {error}")
        os._exit(0)
    control.say(is_valid=True)
    control.hear()
    control.close()
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _take_over(program)
    return run


def _look_like(program: Program) -> None:
    """Gives the interpreter the path and the arguments of the program."""
    if not sys.flags.safe_path:
        sys.path[0] = program.first_path
    sys.argv[:] = program.arguments
    sys.orig_argv[:] = program.words


def _show_main(program: Program, path: str) -> None:
    """Names the file of the program where a module may look for it as it is imported."""
    vars(sys.modules["__main__"])["__file__"] = path
    if program.module is not None:
        sys.argv[0] = path


def _check(program: Program, beginning: Beginning, files: dict[str, tuple[int, int, int]]) -> None:
    """Raises if the program would not import now what was imported then."""
    if Beginning(program).texts != beginning.texts:
        raise ImportError("the program begins with other imports now")
    for path, identity in files.items():
        if _identity(path) != identity:
            raise ImportError(f"'{path}' has changed")
    refuse_own_modules(program)


def _take_over(program: Program) -> None:
    """Makes the interpreter what it would be if it had been started with the program."""
    sys.argv[:] = program.arguments
    _rename(program.words)
    namespace, at_start = vars(sys.modules["__main__"]), _AT_START
    at_start["__doc__"] = None
    at_start.pop("__file__", None)
    if "__annotations__" in at_start:
        at_start["__annotations__"] = {}
    namespace.clear()
    namespace.update(at_start)


def _end(code: int, system: Any = sys, interrupt: type[BaseException] = KeyboardInterrupt) -> None:
    """Ends as the interpreter does after a program; it ends itself where a script was interrupted."""
    if code and getattr(system, "last_type", None) is not interrupt:
        raise SystemExit(1)


if __name__ == "__main__":
    # One statement: `main` leaves nothing of this file in the namespace, and only this frame on the stack.
    _end(main()())
