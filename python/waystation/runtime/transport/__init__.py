"""Bytes between hosts that share no XLA mesh: what `Send` and `Recv` of a low program are carried by.

`interface` is what hosts need; `tcp` is it, by the engine. Importing this imports neither Ray nor JAX.
"""

from waystation.runtime.transport.interface import Block, Fetch, Key, Transport, Wanted
from waystation.runtime.transport.tcp import TcpTransport

__all__ = ["Block", "Fetch", "Key", "TcpTransport", "Transport", "Wanted"]
