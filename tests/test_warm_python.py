"""Programs that are forked warm do what those of a fresh Python do, as far as anybody beside them can see."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.warm_python import python

PROGRAMS = {
    "code": ["-c", "import sys; print(sys.argv, sys.path[0], __name__, input())", "a", "-b"],
    "no place": ["-P", "-c", "import sys; print('' in sys.path)"],
    "file": ["program.py", "a"],
    "module": ["-m", "program", "a"],
    "no file": ["absent.py"],
    "option": ["-W", "error", "-c", "import warnings; warnings.warn('told')"],
    "exit code": ["-c", "raise SystemExit(3)"],
    "last words": ["-c", "raise SystemExit('why')"],
    "killed": ["-c", "import os; print('lost'); os.kill(os.getpid(), 9)"],
    "aborted": ["-c", "import os; os.abort()"],
    "what ends last": [
        "-c",
        "import atexit, threading\natexit.register(print, 'last')\nlock = threading.Lock()\nlock.acquire()\n"
        "threading.Thread(target=lambda: (lock.acquire(), print('thread'))).start()\n"
        "print('first')\nlock.release()",
    ],
    "setting of JAX": [
        "-c",
        "import jax; print(jax.config.jax_numpy_rank_promotion, jax.config.jax_platforms)",
    ],
    "frameworks": ["-c", "import jax, torch; print(jax.numpy.arange(3).sum(), torch.arange(3).sum())"],
}
PROGRAM = """
import os, pickle, sys
class Own: pass
print(sys.argv, __file__, __name__, sys.path[0], os.getcwd(), os.environ["OWN"])
print(type(pickle.loads(pickle.dumps(Own()))), file=sys.stderr)
"""


@pytest.mark.share(15)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_and_ends_as_ever(name: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ends = []
    for command in (sys.executable, python()):
        done = subprocess.run(
            [command, *PROGRAMS[name]],
            cwd=tmp_path,
            env=os.environ
            | {"OWN": "this"}
            | ({"JAX_NUMPY_RANK_PROMOTION": "warn"} if "JAX" in name else {}),
            input="told\n",
            capture_output=True,
            text=True,
            check=False,
        )
        ends.append((done.returncode, done.stdout, done.stderr.splitlines()[-1:]))
    assert ends[0] == ends[1]


def test_signals_arrive() -> None:
    code = "import signal, time\nsignal.signal(15, lambda *_: exit(7))\nprint(flush=True)\ntime.sleep(600)"
    for number, expected in ((signal.SIGTERM, 7), (signal.SIGUSR1, -signal.SIGUSR1), (signal.SIGKILL, -9)):
        with subprocess.Popen([python(), "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(number)
            assert process.stdout.read() == b"", "nobody has it open any more"
            assert process.wait() == expected
