"""Starts programs of several processes and looks after them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 300


@dataclass
class JaxJob:
    """A JAX program of several processes, each with some fake CPU devices."""

    processes: int
    devices: int
    environment: dict[str, str] = field(default_factory=dict)

    def start(
        self, *arguments: str, module: str = "tests.distributed.jax_program"
    ) -> list[subprocess.Popen[str]]:
        """Starts the processes, which join each other."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={self.devices}",
            "COORDINATOR": f"127.0.0.1:{port}",
            "PROCESS_COUNT": str(self.processes),
            **self.environment,
        }
        return [
            subprocess.Popen(
                [sys.executable, "-W", "error", "-m", module, *arguments],
                env=shared | {"PROCESS_INDEX": str(index)},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(self.processes)
        ]

    def run(self, directory: Path, *arguments: str) -> list[str]:
        """Runs a program to its end; every process must succeed. Returns what each printed."""
        running = self.start(str(directory), *arguments)
        try:
            outputs = [process.communicate(timeout=HANG_S) for process in running]
        finally:
            for process in running:
                process.kill()
        for index, (process, (output, errors)) in enumerate(zip(running, outputs, strict=True)):
            told = f"process {index} of {self.processes} ended with {process.returncode}:\n{errors[-6000:]}"
            assert process.returncode == 0, told
            assert output.endswith("done\n"), told
        return [output for output, _ in outputs]
