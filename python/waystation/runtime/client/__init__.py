"""The client: what a program holds of the arrays and functions that it has on slices.

`backend` is what runs its programs, by way of a controller; `local` has one in this process.
`slices` are devices, `functions` and `pmap` place functions on them, `programs` makes one program of many
calls, and `client` sends what was recorded. Most of this needs JAX, so nothing of it is imported here.
"""

from waystation.runtime.client.backend import Backend

__all__ = ["Backend"]
