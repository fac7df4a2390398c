"""What a program imports after `install`."""

from __future__ import annotations

import importlib
from typing import Any

from tests.support.programs import Place


def imports(place: Place) -> dict[str, Any]:
    del place
    import waystation.compat.orbax

    waystation.compat.orbax.install()
    waystation.compat.orbax.install()  # nothing more

    found = {
        name: importlib.import_module(module).__name__
        for name, module in {
            "package": "orbax.checkpoint",
            "args": "orbax.checkpoint.args",
            "step": "orbax.checkpoint.path.step",
            "v1": "orbax.checkpoint.experimental.v1",
        }.items()
    }
    grain: Any = importlib.import_module("grain.python")
    flax: Any = importlib.import_module("flax.training.checkpoints")
    refused = ""
    try:
        importlib.import_module("orbax.checkpoint.serialization")
    except ImportError as error:
        refused = type(error).__name__
    spec = waystation.compat.orbax.args.__spec__
    return {
        **found,
        "flax": flax.ocp.__name__,
        "grain": issubclass(grain.PyGrainCheckpointSave, waystation.compat.orbax.args.CheckpointArgs),
        "refused": refused,
        "spec": None if spec is None else spec.name,
    }


def imports_of_version_1(place: Place) -> dict[str, Any]:
    del place
    import waystation.compat.orbax

    waystation.compat.orbax.install(version_1_only=True)
    package: Any = importlib.import_module("orbax.checkpoint")
    twice = ""
    try:
        waystation.compat.orbax.install()
    except ValueError as error:
        twice = type(error).__name__
    return {
        "v1": package.v1.__name__,
        "below": importlib.import_module("orbax.checkpoint.experimental.v1.training").__name__,
        "package": package.CheckpointManager.__module__.startswith("orbax."),
        "more": importlib.import_module("orbax.checkpoint.experimental.emergency").__name__,
        "twice": twice,
    }
