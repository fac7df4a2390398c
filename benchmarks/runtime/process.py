"""The process of one part of an experiment: `python -m benchmarks.runtime.process REQUEST`."""

from __future__ import annotations

import importlib

from benchmarks.processes import Outcome, answer
from benchmarks.runtime.request import Request


def run(request: Request) -> Outcome:
    """All runs of the part."""
    # Only what is measured is imported: Ray and JAX take seconds.
    module = importlib.import_module(f"benchmarks.runtime.{request.experiment}")
    return {"status": "ok", "runs": list(module.measure(request))}


if __name__ == "__main__":
    answer(Request, run)
