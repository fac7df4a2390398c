"""Hosts: processes that own devices and do what they are told, in order.

`instructions` says what a host can be told, `order` and `execution_queue` in which order it does it (neither
knows Ray or JAX), `execution` and `functions` do it with JAX. `world` makes a process one of an island, and
`host` is the Ray actor that holds all of this together. What drives a host is `waystation.runtime.cluster`.
"""
