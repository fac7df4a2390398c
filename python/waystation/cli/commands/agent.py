"""`waystation agent`: becomes the agent of this host, whose options it hands on as they are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NoReturn

from waystation.memory import agent_program


def run(arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by the agent: signals, exit code and process id are the agent's.

    Raises:
        NotFound: The agent is not installed.
    """
    program = agent_program()
    os.execv(program, [str(program), *(arguments or ["--help"])])
