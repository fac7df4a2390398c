"""One process agrees with itself."""

import subprocess
import sys

import pytest

from waystation import coordination
from waystation.errors import InvalidInput, NotFound


def test_a_session_of_one_process() -> None:
    coordinator = coordination.current()
    assert (coordinator.process_index, coordinator.process_count) == (0, 1)
    session = coordinator.open("save 'x'", deadline_s=1)
    assert session.is_primary
    assert session.round(lambda: b"part", lambda parts: b"decided " + b"".join(parts)) == b"decided part"
    session.barrier()
    assert session.broadcast(lambda: b"made") == b"made"
    assert session.gather(b"part") == [b"part"]
    session.close()
    session.close()


def test_errors_are_raised_as_they_are() -> None:
    session = coordination.current().open("save 'x'", deadline_s=1)
    error = NotFound("gone")

    def fail(*_: object) -> bytes:
        raise error

    for attempt in (lambda: session.round(fail, lambda parts: b""), lambda: session.round(lambda: b"", fail)):
        with pytest.raises(NotFound) as raised:
            attempt()
        assert raised.value is error
        assert error.context == {}


def test_only_process_0_can_decide() -> None:
    with pytest.raises(InvalidInput, match=r"process 2 is to decide, but there is only process 0; set multi"):
        coordination.current().open("save 'x'", deadline_s=1, primary=2)


@pytest.mark.parametrize("loaded", ["json", "jax", "torch", "torch.distributed"])
def test_finding_the_coordinator_loads_no_framework(loaded: str) -> None:
    code = f"""
import sys, {loaded}
from waystation import coordination
before = set(sys.modules)
for _ in range(2):
    assert coordination.current().process_count == 1
assert set(sys.modules) == before, set(sys.modules) - before
assert {loaded!r} != "json" or not {{"jax", "torch"}} & before
if "jax" in before:  # nor was a backend started, which would forbid jax.distributed.initialize
    assert not jax._src.xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
