"""A plugin of pytest under which programs get genuine Orbax."""

from orbax.checkpoint import v1

assert v1.__name__.startswith("orbax."), "genuine Orbax is what it says"
