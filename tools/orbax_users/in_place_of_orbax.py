"""A plugin of pytest under which `orbax.checkpoint.v1` is Waystation for all that imports it later."""

import sys

import orbax.checkpoint

import waystation

orbax.checkpoint.v1 = waystation
sys.modules["orbax.checkpoint.v1"] = waystation
for name in ("arrays", "errors", "handlers", "multihost", "options", "partial", "path", "training", "tree"):
    sys.modules[f"orbax.checkpoint.v1.{name}"] = getattr(waystation, name)
