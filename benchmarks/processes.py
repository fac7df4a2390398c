"""A process that measures one thing: it is started with a request, and leaves an outcome, both as JSON.

An outcome is `ok`, with what was measured; `missing`, where a library or a device is not here; or `failed`.
The last two have a reason. It goes to a file, because libraries print what they like to standard output.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.systems import UnavailableError

ROOT = Path(__file__).resolve().parent.parent
Outcome = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a process is asked to do; the kinds of it say that.

    Attributes:
        output: Where the outcome goes.
        scratch: A directory for the warm-up, gone afterwards; empty if there is none.
    """

    output: str = ""
    scratch: str = ""

    def to_json(self) -> str:
        """The argument of the process."""
        return json.dumps(asdict(self))


Asked = TypeVar("Asked", bound=Request)


def answer(kind: type[Asked], work: Callable[[Asked], Outcome]) -> Asked:
    """Does what this process was started for; returns what that was."""
    # Without this, JAX looks for accelerators, and the frameworks disagree on where arrays live.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    request = kind(**json.loads(sys.argv[1]))
    Path(request.output).write_text(json.dumps(attempt(work, request)))
    return request


def attempt(work: Callable[..., Outcome], *arguments: Any) -> Outcome:
    """The outcome of work that measures, or why there is nothing to measure."""
    try:
        return work(*arguments)
    except (ModuleNotFoundError, UnavailableError) as error:
        return {"status": "missing", "reason": str(error)}
    except Exception as error:
        return {
            "status": "failed",
            "reason": f"{type(error).__name__}: {error}"[:2000],
            "traceback": traceback.format_exc()[-8000:],
        }


def spawn(
    module: str,
    request: Request,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    interpreter: str = sys.executable,
) -> Outcome:
    """Runs `python -m module REQUEST` as a fresh process; its outcome, or why there is none.

    Args:
        module: The program, which calls `answer`.
        request: What it is asked to do.
        timeout_s: When to give up.
        environment: That of the process; this one's by default.
        interpreter: The Python that runs it; this one by default.
    """
    output = Path(request.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    command = [interpreter, "-m", module, request.to_json()]
    # Installed packages have their bytecode; what is measured here is no reason to compile ours each time.
    environment = dict(os.environ if environment is None else environment)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=ROOT,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"status": "failed", "reason": f"not finished after {timeout_s:.0f} s"}
    finally:
        if request.scratch:
            shutil.rmtree(request.scratch, ignore_errors=True)
    if not output.exists():
        reason = f"the process ended with status {done.returncode}: {done.stderr[-2000:]}"
        return {"status": "failed", "reason": reason}
    outcome: Outcome = json.loads(output.read_text())
    return outcome
