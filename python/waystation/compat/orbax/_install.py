"""`install`: the program's own `import orbax.checkpoint` gives this package.

A finder at the front of the import system answers for `orbax.checkpoint` and what is below it, and for
nothing else; so a library that imports it gets the same. Invariant: Orbax itself is then not imported in this
process, unless version 1 alone is replaced. Then all else of it is imported as ever.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Literal

from waystation._errors import InvalidInput
from waystation.compat.orbax.options import set_layout

_NAME = "orbax.checkpoint"
_OURS = "waystation.compat.orbax"

# What Orbax has and this package has not, and why; the documentation has the same table.
REFUSED = {
    "aggregate_handlers": "nothing is stored in such files any more",
    "msgpack_utils": "nothing is stored in such files any more; flax.serialization has the same functions",
    "serialization": "arrays are written and read by Waystation's engine, not by TensorStore",
    "experimental": "only experimental.v1 is here, which is the package waystation itself",
    "testing": "these are Orbax's own benchmarks",
}
_OF_VERSION_1 = ("v1", "experimental.v1")


def refused(name: str) -> object:
    """What a name of Orbax's is that this package lacks.

    Raises:
        AttributeError: It is not to be had, and why.
    """
    if name == "v1":
        return importlib.import_module("waystation")
    why = REFUSED.get(name)
    raise AttributeError(f"module '{_OURS}' has no attribute '{name}'" + ("" if why is None else f": {why}"))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for `orbax.checkpoint`.

    Args:
        version_1_only: Answer for version 1 and nothing else.
    """

    def __init__(self, version_1_only: bool) -> None:
        self.version_1_only = version_1_only
        self.roots = [f"{_NAME}.{root}" for root in _OF_VERSION_1] if version_1_only else [_NAME]
        self._specs: dict[str, importlib.machinery.ModuleSpec] = {}

    def _imported(self, name: str) -> types.ModuleType:
        """A module under its own name, whose spec the import system is about to replace."""
        module = importlib.import_module(name)
        if module.__spec__ is not None:
            self._specs[module.__name__] = module.__spec__
        return module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if not any(fullname == root or fullname.startswith(f"{root}.") for root in self.roots):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """The module of this package that stands for another.

        Raises:
            ModuleNotFoundError: There is none.
        """
        rest = spec.name.removeprefix(_NAME).removeprefix(".")
        if rest == "experimental":
            shell = types.ModuleType(spec.name)
            shell.__path__ = []
            return shell
        for root in _OF_VERSION_1:
            if rest == root or rest.startswith(f"{root}."):
                return self._imported("waystation" + rest.removeprefix(root))
        if rest == "path.step":
            rest = "step"
        try:
            return self._imported(f"{_OURS}.{rest}" if rest else _OURS)
        except ModuleNotFoundError as error:
            if error.name != f"{_OURS}.{rest}" and not str(error.name).startswith(f"{_OURS}."):
                raise
            why = REFUSED.get(rest.split(".")[0], "Waystation does not have this part of Orbax")
            raise ModuleNotFoundError(
                f"No module named '{spec.name}': waystation.compat.orbax.install() has put Waystation in the "
                f"place of Orbax, and {why}",
                name=spec.name,
            ) from None

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing but to leave it as it was: it has been imported under its own name."""
        own = self._specs.pop(module.__name__, None)
        if own is not None:
            module.__spec__ = own


def install(layout: Literal["orbax", "native"] = "orbax", *, version_1_only: bool = False) -> None:
    """Puts this package in the place of `orbax.checkpoint`, for all imports of the program from now on.

    Args:
        layout: In which layout version 0 saves checkpoints: `orbax`, or `native`, Waystation's own.
        version_1_only: Replace `orbax.checkpoint.v1` alone, for programs that save by version 1 and import
            parts of Orbax beside it that are not here, such as MaxText.

    Raises:
        InvalidInput: What is to be replaced has been imported already, or was replaced in another way before.
    """
    set_layout(layout)
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            if finder.version_1_only != version_1_only:
                raise InvalidInput("install() was called before, with another version_1_only; call it once")
            return
    replaced = _Finder(version_1_only)
    for name in replaced.roots:
        if name in sys.modules:
            raise InvalidInput(
                f"{name} has been imported already; call waystation.compat.orbax.install() before the "
                "program, or a library that it uses (flax, grain), imports it"
            )
    sys.meta_path.insert(0, replaced)
    if "orbax" not in sys.modules and importlib.util.find_spec("orbax") is None:
        parent = types.ModuleType("orbax")
        parent.__path__ = []
        sys.modules["orbax"] = parent
