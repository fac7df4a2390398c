"""One process agrees with itself."""

import subprocess
import sys

import pytest

from waystation import coordination
from waystation.coordination import jax_distributed, jax_private
from waystation.errors import InvalidInput, NotFound, Unsupported


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
@pytest.mark.share(4)
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


def test_a_jax_without_the_calls_is_refused_by_name() -> None:
    class Client:
        key_value_set_bytes = key_value_dir_get_bytes = blocking_key_value_get_bytes = None
        key_value_try_get_bytes = key_value_delete = None

    with pytest.raises(Unsupported, match=r"service of JAX 0\.\S+ lacks key_value_increment, which"):
        jax_distributed.coordinator(Client(), 0, 2)


def test_a_jax_that_hides_its_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    monkeypatch.setattr(jax_private, "distributed", lambda: (None, 0, 1))
    assert coordination.current().process_count == 1
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(Unsupported, match="runs in several processes and does not show"):
        coordination.current()
