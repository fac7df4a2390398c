"""Whether processes that load a model together have the same one.

Two steps of a training have the same headers, as have two fine-tunings of one model: what each process has
opened decides which it gets. Processes that have opened the same files, or the same versions of objects of a
store, have the same model, and nothing is read to know it. Others, such as hosts with a copy each, compare
samples of the tensors. Invariants: all processes come to the same answer; files that are the same are never
refused.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import uuid
from collections.abc import Callable, Mapping, Sequence

from waystation import _processes
from waystation._errors import InvalidInput
from waystation._threads import Threads
from waystation.coordination import Session, collective
from waystation.safetensors.headers import Header
from waystation.safetensors.open_files import OpenFiles

# What each process reads, of the middle of tensors: little beside the model, and within a second.
_MOST_SAMPLES = 256
_MOST_SAMPLES_OF_STORES = 64
_SAMPLE_BYTES = 256
_SAMPLES_OF_THREAD = 32
_SAMPLES_OF_THREAD_OF_STORES = 2
_THREADS = 32
_DIGEST_CHARACTERS = 16


def mark_of(headers: Sequence[Header]) -> str:
    """What is equal in two processes only if they have opened the same files.

    Machines that are copies of each other may say the same of files that each has for itself, which then are
    copies too.
    """
    kernel = _kernel()
    seen: list[tuple[object, ...]] = []
    for header in headers:
        nbytes, tag = header.identity.nbytes, header.identity.tag
        if header.is_tagged:
            seen.append((header.path, nbytes, tag))
        else:  # what is not of this system is no device and no inode, either
            place = None if header.source.engine is None else header.path
            seen.append((kernel, place, *header.identity))
    return hashlib.sha256(repr(seen).encode()).hexdigest()


def require_same(session: Session, opened: OpenFiles, tensors: Mapping[str, int]) -> None:
    """Compares samples of what all processes of a session load.

    Args:
        session: The processes; all of them call this.
        opened: The files of this one.
        tensors: What is loaded of them, by names that are the same in all processes, whatever the tensors
            are called in files.

    Raises:
        InvalidInput: The processes have different models.
    """
    chosen = _spread(sorted(tensors), _MOST_SAMPLES if opened.is_local else _MOST_SAMPLES_OF_STORES)

    def describe(samples: Sequence[str]) -> bytes:
        return json.dumps([opened.path, dict(zip(chosen, samples, strict=True))]).encode()

    def compare(parts: Sequence[bytes]) -> bytes:
        (path, own), *others = [json.loads(part) for part in parts]
        for process, (other_path, other) in zip(session.processes[1:], others, strict=True):
            # Of a store a process samples fewer tensors, some of those that it samples of files.
            name = next((name for name in own if other.get(name, own[name]) != own[name]), None)
            if name is not None:
                raise InvalidInput(
                    f"processes {session.processes[0]} and {process} load different models together: the "
                    f"values of {name!r} are not the same in '{path}' and '{other_path}'; give all of them "
                    "the same model"
                )
        return b""

    collective.attempt(
        session, lambda: _samples(opened, [tensors[name] for name in chosen]), describe, compare
    )


def _spread(names: Sequence[str], most: int) -> list[str]:
    """So many names at most: evenly of all, with the first and the last, for heads are often one of these.

    What is chosen of half, a quarter, … as many is among it.
    """
    count = min(len(names), most)
    chosen = [(number + 1) * len(names) // count - 1 for number in range(count)]
    return [names[place] for place in [0, *chosen[1:]]] if names else []


def _samples(opened: OpenFiles, tensors: Sequence[int]) -> list[str]:
    """A digest of some bytes of each tensor."""
    by_file: dict[str, list[int]] = {}
    for number in sorted(tensors, key=lambda number: opened.extent(number)[1]):
        by_file.setdefault(opened.path_of(number), []).append(number)
    # More at a time from stores, where each waits for an answer.
    most = _SAMPLES_OF_THREAD if opened.is_local else _SAMPLES_OF_THREAD_OF_STORES
    shares = [own[begin : begin + most] for own in by_file.values() for begin in range(0, len(own), most)]
    with Threads(_THREADS, "samples") as readers:
        found = dict(itertools.chain.from_iterable(readers.map(_reader(opened), shares)))
    return [found[number] for number in tensors]


def _reader(opened: OpenFiles) -> Callable[[Sequence[int]], list[tuple[int, str]]]:
    def read(numbers: Sequence[int]) -> list[tuple[int, str]]:
        """Samples of tensors of one file."""
        digests = []
        with opened.extent(numbers[0])[0].opened() as file:
            for number in numbers:
                _, begin, end = opened.extent(number)
                nbytes = min(_SAMPLE_BYTES, end - begin)
                data = file.read(begin + (end - begin - nbytes) // 2, nbytes) if nbytes else b""
                digests.append((number, hashlib.sha256(data).hexdigest()[:_DIGEST_CHARACTERS]))
        return digests

    return read


def _kernel() -> str:
    try:
        return _processes.boot_id()
    except OSError:
        return uuid.uuid4().hex  # nobody else says so
