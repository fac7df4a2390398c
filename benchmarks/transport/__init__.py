"""Measures how blocks of arrays get from one process to another: the transport of the runtime, JAX's transfer
server, Ray's object store, and a raw socket, in the same run.
"""
