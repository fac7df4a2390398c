"""A plugin of pytest under which version 1 of Orbax is Waystation, and all else of it Orbax's own."""

import waystation.compat.orbax

waystation.compat.orbax.install(version_1_only=True)
