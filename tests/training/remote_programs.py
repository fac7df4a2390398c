"""What other programs do with a sequence that has a remote."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.checkpoint.copy_programs import copying
from tests.support import s3
from tests.support.programs import HANG_S, Place

from waystation.storage import AnyPath
from waystation.training import Checkpointer, Remote, preservation_policies, save_decision_policies
from waystation.training import remote as remotes

# The store of a busy machine may take longer to answer.
remotes._ANSWERS_WITHIN_S = HANG_S


def state(step: int) -> dict[str, Any]:
    """A state in several files, under the options of `opened`."""
    return {"a": [np.full(300_000, step + number, np.int32) for number in range(4)], "step": step}


def opened(directory: AnyPath, remote: Remote | None, n: int | None = None, **given: Any) -> Checkpointer:
    """A checkpointer that saves every step."""
    from waystation import Context

    context = Context(given.pop("context", None))
    context.file.file_bytes_target = 1 << 20
    keep = preservation_policies.PreserveAll() if n is None else preservation_policies.LatestN(n)
    return Checkpointer(
        directory,
        remote=remote,
        context=context,
        save_decision_policy=save_decision_policies.FixedIntervalPolicy(1),
        preservation_policy=keep,
        **given,
    )


def save_and_upload_slowly(environment: Mapping[str, str], directory: Path, remote: AnyPath) -> None:
    """Saves two steps, whose upload takes many seconds; the program is killed meanwhile."""
    os.environ.update(environment)
    copying._JOB_BYTES = 1 << 20
    with opened(directory, Remote(remote, bytes_per_second=1 << 20)) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.save(2, state(2))


def save_and_hang(
    environment: Mapping[str, str], directory: Path, remote: AnyPath, hangs_in: str, hangs: Any
) -> None:
    """Saves step 3 by a clock that was put back an hour; its upload hangs, and the program is killed then."""
    os.environ.update(environment)
    now_ns = time.time_ns
    time.time_ns = lambda: now_ns() - 3600 * 10**9

    def hang(*_: Any, **__: Any) -> Any:
        hangs.set()
        time.sleep(HANG_S)

    if hangs_in == "record":
        remotes.UploadRecord.begin = hang  # type: ignore[method-assign]
    else:
        remotes.Copying.run = hang  # type: ignore[method-assign]
    with opened(directory, Remote(remote, keep=preservation_policies.LatestN(2))) as checkpointer:
        checkpointer.save(3, state(3))


def save_again_and_hang(
    environment: Mapping[str, str], directory: Path, remote: AnyPath, steps: Sequence[int], hangs: Any
) -> None:
    """Saves steps again, of which the directory keeps the last. Its uploads hang, and it is killed."""
    os.environ.update(environment)
    remotes.UploadRecord.begin = lambda *_, **__: time.sleep(HANG_S)  # type: ignore[method-assign]
    with opened(directory, Remote(remote), n=1) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(10 * step), overwrite=True, force=True)
        hangs.set()
        time.sleep(HANG_S)


def save_again_and_upload(endpoint: str, directory: Path, remote: AnyPath) -> None:
    """Saves steps 2, 3 and 4 again, of which the directory keeps the last, and uploads only then."""
    with (
        s3.context(endpoint),
        opened(directory, Remote(remote, keep=preservation_policies.LatestN(3)), n=1) as checkpointer,
    ):
        checkpointer._remote._changing.acquire()  # type: ignore[union-attr]
        try:
            for step in (2, 3, 4):
                checkpointer.save(step, state(10 * step), overwrite=True, force=True)
        finally:
            checkpointer._remote._changing.release()  # type: ignore[union-attr]
        checkpointer.wait()


def save_and_wait(
    place: Place, environment: Mapping[str, str], directory: Path, remote: AnyPath
) -> list[Any]:
    """Saves steps in several processes; tells what each knows once all is uploaded."""
    os.environ.update(environment)
    place.connect()
    with opened(directory, Remote(remote, bytes_per_second=8 << 20)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
        checkpointer.wait()
        known = [[info.step, list(info.tiers)] for info in checkpointer.checkpoints]
    place.disconnect()
    return known


def save_together(
    place: Place, environment: Mapping[str, str], directory: Path, remote: AnyPath
) -> list[Any]:
    """Saves steps in several processes, damages the newest, and loads it from the remote."""
    os.environ.update(environment)
    place.connect()
    with opened(directory, Remote(remote)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
        checkpointer.wait()
    if place.index == 0:
        for file in (directory / "2").rglob("*.safetensors"):
            file.write_bytes(bytes(file.stat().st_size))
    with opened(directory, Remote(remote)) as checkpointer:
        tiers = [info.tiers for info in checkpointer.checkpoints]
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = checkpointer.load(2)
    place.disconnect()
    return [loaded["step"], tiers]


def save_again_together(
    place: Place, environment: Mapping[str, str], directory: Path, remote: AnyPath
) -> list[Any]:
    """Saves a step again in several processes, whose directory keeps the newest only, while nothing is
    uploaded; tells what each lists then, and after the uploads."""
    os.environ.update(environment)
    place.connect()
    may_go_on = threading.Event()
    run = remotes.Copying.run

    def held_up(self: Any, *arguments: Any, **given: Any) -> Any:
        assert may_go_on.wait(HANG_S)
        return run(self, *arguments, **given)

    with opened(directory, Remote(remote), n=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
        checkpointer.wait()
        remotes.Copying.run = held_up  # type: ignore[method-assign]
        checkpointer.save(1, state(10), overwrite=True, force=True)
        checkpointer.save(3, state(3), force=True)
        known = [[info.step for info in checkpointer.checkpoints]]
        may_go_on.set()
        checkpointer.wait()
        known.append([info.step for info in checkpointer.checkpoints])
        checkpointer.save(4, state(4), force=True)
        checkpointer.wait()
        known.append([info.step for info in checkpointer.checkpoints])
    place.disconnect()
    return known
