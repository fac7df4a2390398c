"""A plugin of pytest under which `orbax.checkpoint` is Waystation for all that imports it later."""

import waystation.compat.orbax

waystation.compat.orbax.install()
