"""A child that was forked from a host has none of the transport's threads: it neither waits for them nor ends
anything of its parent's."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from tests.runtime.transport.processes import SECRET

from waystation.errors import InvalidInput
from waystation.runtime.transport import TcpTransport, Wanted

BOUND_S = 60.0


def forked(*, is_quick: bool) -> None:
    """What a host does whose program forks. It is a process of its own, so that nothing else is in it."""
    transport = TcpTransport("left/0", SECRET)
    child = os.fork()
    if child == 0:
        try:
            transport.offer({(1, 1, 1): np.zeros(4)})
        except InvalidInput as error:
            if f"process {os.getppid()}" not in error.message:
                os._exit(2)
        else:
            os._exit(3)
        transport.close()
        del transport
        gc.collect()
        if is_quick:
            os._exit(0)
        sys.exit(0)
    end_s = time.monotonic() + BOUND_S
    while time.monotonic() < end_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise AssertionError("the child has not ended")
    assert status == 0, status
    # The parent's goes on.
    transport.offer({(1, 1, 2): np.arange(4.0)})
    wanted = Wanted((1, 1, 2), (4,), np.dtype(np.float64))
    (block,) = transport.fetch(transport.address, [wanted], deadline_s=BOUND_S).result(BOUND_S)
    assert block.tolist() == [0, 1, 2, 3]
    transport.close()


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.share(2)
def test_a_child_of_a_host_ends(is_quick: bool) -> None:
    script = f"from tests.runtime.transport.test_forks import forked; forked(is_quick={is_quick})"
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=3 * BOUND_S)
