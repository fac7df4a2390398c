"""Bytes between hosts that share no XLA mesh: what `Send` and `Recv` of a low program are carried by.

`interface` is what hosts need. Importing this imports neither Ray nor JAX.
"""

from waystation.runtime.transport.interface import Block, Fetch, Key, Transport, Wanted

__all__ = ["Block", "Fetch", "Key", "Transport", "Wanted"]
