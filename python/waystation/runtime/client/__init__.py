"""The client: what a program holds of the arrays and functions that it has on slices.

`backend` is the seam to what runs its programs.
"""

from waystation.runtime.client.backend import Backend

__all__ = ["Backend"]
