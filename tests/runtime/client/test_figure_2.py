"""The code of figure 2 of the Pathways paper, as printed."""

from __future__ import annotations

import jax
import numpy
import pytest

import waystation.runtime as pw
from waystation.errors import InvalidInput


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize("traced", [True, False])
def test_figure_2(traced: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def get_devices(n):
        """Allocates `n` virtual TPU devices on an island."""
        device_set = pw.make_virtual_device_set()
        return device_set.add_slice(tpu_devices=n).tpus

    a = jax.pmap(lambda x: x * 2., devices=get_devices(2))  # fmt: skip
    b = jax.pmap(lambda x: x + 1., devices=get_devices(2))  # fmt: skip
    c = jax.pmap(lambda x: x / 2., devices=get_devices(2))  # fmt: skip

    def f(v):
        x = a(v)
        y = b(x)
        z = a(c(x))
        return (y, z)

    if traced:
        f = pw.program(f)
    print(f(numpy.array([1., 2.])))  # fmt: skip # noqa: T201
    assert capsys.readouterr().out == "(Array([3., 5.], dtype=float32), Array([2., 4.], dtype=float32))\n"


def test_other_devices_go_to_jax(client: pw.Client) -> None:
    doubled = jax.pmap(lambda x: x * 2, devices=jax.devices()[:2])
    assert doubled(numpy.arange(2)).tolist() == [0, 2]
    on = client.make_virtual_device_set().add_slice(devices=4)
    with pytest.raises(InvalidInput, match="not all devices"):
        jax.pmap(lambda x: x, devices=on.devices[:2])


def test_pmap_maps_as_jax_does(client: pw.Client) -> None:
    on = client.make_virtual_device_set().add_slice(devices=4)

    def function(x, y, *, z):
        return {"sum": jax.lax.psum(x, "i") + y, "own": x * z}, y + z

    options = {"axis_name": "i", "in_axes": (1, None), "out_axes": ({"sum": 0, "own": 1}, 0)}
    x = numpy.arange(12, dtype="float32").reshape(3, 4)
    y = numpy.arange(3, dtype="float32")
    z = numpy.arange(4, dtype="float32")
    ours = jax.pmap(function, devices=on.devices, **options)(x, y, z=z)
    theirs = jax.pmap(function, devices=jax.devices()[:4], **options)(x, y, z=z)
    jax.tree.map(numpy.testing.assert_array_equal, jax.tree.map(numpy.asarray, ours), theirs)
