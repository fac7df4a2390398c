"""Who runs the model whose start is measured: transformers, or vLLM, which has an environment of its own.

What a model must say is, in transformers, what it said before it was ever saved; in vLLM, whose kernels round
otherwise, what it says in a start that nobody measures, with weights that the safetensors package has read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import startup_loaders, startup_model, startup_vllm
from benchmarks.processes import ROOT
from benchmarks.startup_loaders import Loader

TRANSFORMERS, VLLM = "transformers", "vllm"


@dataclass(frozen=True, slots=True)
class Server:
    """What runs a model.

    Attributes:
        name: Its name, and that of the module that is imported for it.
        loaders: By name.
        ours: The loader that others are compared with.
        say: Has a model say tokens, as `startup_model.say` does.
        digest: That of a model's weights and buffers.
        teacher: The loader that all others must agree with; None for what the model said before it was saved.
        variables: Of the environment, for its processes.
        interpreter: The Python that has it where this one has not, and what makes that.
    """

    name: str
    loaders: Mapping[str, Loader]
    ours: str
    say: Callable[[Any, int, Callable[[], None]], list[int]]
    digest: Callable[[Any], str]
    teacher: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    interpreter: tuple[Path, str] | None = None

    def find_interpreter(self) -> str:
        """The Python that its processes run in.

        Raises:
            SystemExit: The server is not installed.
        """
        if self.interpreter is None or find_spec(self.name) is not None:
            return sys.executable
        path, made_by = self.interpreter
        if not path.exists():
            raise SystemExit(f"{self.name} is not installed; `{made_by}` makes an environment that has it")
        return str(path)

    def environment(self, cache: Path) -> dict[str, str]:
        """The environment of its processes: nothing is asked of a network, or found on other devices.

        Args:
            cache: A directory for what they keep for each other.
        """
        path = os.pathsep.join(filter(None, (str(ROOT / "python"), os.environ.get("PYTHONPATH"))))
        inherited = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        return {**inherited, **{name: value.format(cache=cache) for name, value in self.variables.items()}}


SERVERS = {
    server.name: server
    for server in (
        Server(
            TRANSFORMERS,
            startup_loaders.LOADERS,
            startup_loaders.OURS,
            startup_model.say,
            startup_model.digest,
        ),
        Server(
            VLLM,
            startup_vllm.LOADERS,
            startup_vllm.OURS,
            startup_vllm.say,
            startup_vllm.digest,
            teacher=startup_vllm.TEACHER,
            variables=startup_vllm.VARIABLES,
            interpreter=(ROOT / ".venv-vllm" / "bin" / "python", "make bench-startup-vllm"),
        ),
    )
}
