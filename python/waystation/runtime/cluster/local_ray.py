"""A Ray of this machine alone, for a program that has named no cluster: `python -m
waystation.runtime.cluster.local_ray`.

A process of its own starts it, so that the program neither forks nor gets Ray's signal handlers, and holds a
pipe to the program. When the pipe closes, however the program has ended, this process ends too, and the
kernel ends Ray's with it. Ray listens to this machine only and asks for its token (`~/.ray/auth_token`); it
has no dashboard, no autoscaler, and little memory for objects.

Ray's private modules are used since only there can its parts be left out: each of them is a process that
takes seconds of CPU to start.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any

from waystation.runtime.cluster.status import PLACE

# Of this machine alone. Ray takes "127.0.0.1" for "this machine, as others see it", and would connect
# elsewhere.
ADDRESS = "127.0.0.2"
PLACES = 4096
OBJECT_STORE_BYTES = 128 << 20

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Hosts without GPUs see the same as this process; they are told which platform to use.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray gives its agents 15 seconds, which they may need on a busy machine.
    "RAY_agent_register_timeout_ms": "120000",
}


def main() -> None:
    """Starts Ray, says where on stdout, and ends with stdin."""
    os.environ.update(_ENVIRONMENT)
    os.environ.pop("RAY_ADDRESS", None)
    # What Ray prints is for its log, not for whoever reads the address.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    node = _start()
    answer.write(json.dumps({"address": node.gcs_address}) + "\n")
    answer.close()
    sys.stdin.buffer.read()
    node.kill_all_processes(check_alive=False, allow_graceful=False)
    # Its logs; whose program was killed nobody else would remove.
    shutil.rmtree(node.get_session_dir_path(), ignore_errors=True)


def _start() -> Any:
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    parameters = RayParams(
        node_ip_address=ADDRESS,
        num_cpus=0,  # Ray would start as many processes ahead
        resources={PLACE: PLACES},
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
    )
    return Node(parameters, head=True, shutdown_at_exit=True, spawn_reaper=True)


if __name__ == "__main__":
    main()
