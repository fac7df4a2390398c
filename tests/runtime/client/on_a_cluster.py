"""Figure 2 of the Pathways paper on two real islands of a cluster, as a process of its own."""

from __future__ import annotations

import sys

import jax
import numpy

import waystation.runtime as pw


def figure_2() -> None:
    """As printed, with slices on both islands."""

    def get_devices(n):
        """Allocates `n` virtual TPU devices on an island."""
        device_set = pw.make_virtual_device_set()
        return device_set.add_slice(tpu_devices=n).tpus

    a = jax.pmap(lambda x: x * 2.0, devices=get_devices(2))
    b = jax.pmap(lambda x: x + 1.0, devices=get_devices(2))
    c = jax.pmap(lambda x: x / 2.0, devices=get_devices(2))

    @pw.program
    def f(v):
        x = a(v)
        y = b(x)
        z = a(c(x))
        return (y, z)

    islands = {function.slice.placement.island for function in (a, b, c)}
    assert islands == {"left", "right"}, islands
    found = f(numpy.array([1.0, 2.0]))
    assert repr(found) == "(Array([3., 5.], dtype=float32), Array([2., 4.], dtype=float32))", found
    for function in (a, b, c):
        function.slice.release()


def main() -> None:
    """Starts its client twice."""
    with pw.connect(sys.argv[1]) as cluster:
        for _ in range(2):
            with cluster.start_client() as client:
                assert cluster.start_client() is client
                figure_2()


if __name__ == "__main__":
    main()
