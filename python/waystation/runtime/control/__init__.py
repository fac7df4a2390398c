"""The connections of control: what the controller, hosts and programs tell each other while programs run.

`credentials` are what both ends prove themselves by, and `packing` packs what is told often;
`connector` is the side of a host or a program (threads), `listener` that of the controller (an event loop).
Neither Ray nor JAX is imported here. `docs/protocol-control.md` specifies the bytes.
"""
