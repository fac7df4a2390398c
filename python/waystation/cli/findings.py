"""What `doctor` looks at, apart from how it is shown. Nothing is imported to learn its version."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from typing import Any, Literal

from waystation._extras import install_command
from waystation.cli import formatting
from waystation.errors import NotFound
from waystation.memory.agent import agent_program

# `info` says nothing about good or bad; `note` is slower or weaker than it could be; `bad` does not work.
Verdict = Literal["good", "info", "note", "bad"]

_LEAST_FREE_BYTES = 1 << 30
_LEAST_LOCKED_BYTES = 1 << 20
_ANSWER_TIMEOUT_S = 10

MEMORY_PLACE = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        name: What was looked at.
        verdict: What it means.
        text: What was found.
        advice: What to do, where it is not good.
    """

    name: str
    verdict: Verdict
    text: str
    advice: str | None = None


# ---- programs ----------------------------------------------------------------------------------


def program_findings() -> list[Finding]:
    """Versions of Python and of the packages that matter."""
    return [
        Finding("waystation", "good", _version("waystation") or "not installed as a package"),
        Finding("python", "good", f"{platform.python_implementation()} {platform.python_version()}"),
        _framework("numpy", (2, 0), "numpy"),
        _jax(),
        _framework("torch", (2, 6), "torch"),
        _framework("ray", (2, 60), "ray"),
        _framework("tensorstore", (0, 1), "orbax"),
    ]


def _jax() -> Finding:
    found = _framework("jax", (0, 6), "jax")
    if found.verdict == "good" and _numbers(found.text) < (0, 12):
        advice = "update to 0.12 or later (needs Python 3.12)"
        return Finding("jax", "note", f"{found.text}: can deadlock on CPU with several devices", advice)
    return found


def _framework(package: str, least: tuple[int, int], extra: str) -> Finding:
    version = _version(package)
    if version is None:
        return Finding(package, "info", f"not installed ({install_command(extra)})")
    if _numbers(version) < least:
        needed = ".".join(map(str, least))
        return Finding(
            package, "bad", f"{version}: too old, {needed} is needed", f"pip install '{package}>={needed}'"
        )
    return Finding(package, "good", version)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


# ---- machine -----------------------------------------------------------------------------------


def machine_findings(probe: dict[str, Any], arena: dict[str, int]) -> list[Finding]:
    """Cores, memory, kernel."""
    available, limit = probe["memory_available_bytes"], probe["memory_limit_bytes"]
    memory = f"{formatting.size(limit)} may be used, {formatting.size(min(available, limit))} of it is free"
    reuse = f"up to {formatting.size(arena['limit_bytes'])} is kept for reuse between saves and loads"
    return [
        Finding("cores", "info", str(probe["cores"])),
        Finding("memory", "info", memory),
        Finding("arena", "info", reuse),
        Finding("kernel", "info", f"{platform.system()} {probe['kernel']}"),
        _huge_pages(probe["huge_pages"]),
        _locked_memory(probe["locked_memory_limit_bytes"]),
        _io_uring(probe["io_uring"]),
    ]


def _huge_pages(setting: str | None) -> Finding:
    if setting in ("always", "madvise"):
        return Finding("huge pages", "good", setting)
    advice = (
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root): memory is then ready sooner"
    )
    return Finding("huge pages", "note", setting or "this kernel has none", advice if setting else None)


def _locked_memory(limit: int | None) -> Finding:
    if limit is None or limit >= _LEAST_LOCKED_BYTES:
        return Finding(
            "locked memory", "good", "unlimited" if limit is None else f"up to {formatting.size(limit)}"
        )
    text = f"up to {formatting.size(limit)}: older kernels then refuse io_uring"
    return Finding(
        "locked memory", "note", text, "raise it: 'ulimit -l unlimited', or --ulimit memlock=-1 in Docker"
    )


def _io_uring(answer: dict[str, Any]) -> Finding:
    advice = (
        "containers often forbid it: allow io_uring_setup, io_uring_enter and io_uring_register in the "
        "seccomp profile, and set kernel.io_uring_disabled to 0"
    )
    return _answered(
        "io_uring", answer, "many requests in flight from one thread", "threads are used instead", advice
    )


# ---- memory tier -------------------------------------------------------------------------------


def memory_tier_findings(
    places: dict[str, Any] | None, kernel: str, shared_huge_pages: str | None
) -> list[Finding]:
    """What the memory tier would find on this host: its program, memory for slots, huge pages.

    Args:
        places: What the probe says of the file system in memory; None if there is none.
        kernel: Its release.
        shared_huge_pages: The setting in effect for files in memory; None if the kernel has none.
    """
    return [_agent(), _memory_file_system(places), _slot_pages(kernel, shared_huge_pages)]


def _agent() -> Finding:
    advice = "install waystation again, or name the program in WAYSTATION_AGENT"
    try:
        program = agent_program()
        told = subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=True, timeout=_ANSWER_TIMEOUT_S
        ).stdout.split()
    except NotFound as error:
        return Finding("agent", "note", error.message)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("agent", "note", f"cannot be run: {error}", advice)
    if told[-1:] != [_version("waystation")]:
        return Finding("agent", "note", f"{program} is of another release: {' '.join(told)}", advice)
    return Finding("agent", "good", str(program))


def _memory_file_system(found: dict[str, Any] | None) -> Finding:
    name = "memory for slots"
    if found is None or found["kind"] != "tmpfs":
        return Finding(name, "note", f"{MEMORY_PLACE} is not a tmpfs", "mount one for 'launch --agent DIR'")
    sizes = f"{formatting.size(found['available_bytes'])} of {formatting.size(found['total_bytes'])}"
    text = f"{MEMORY_PLACE} has {sizes} left"
    if found["available_bytes"] < _LEAST_FREE_BYTES:
        advice = "mount a larger tmpfs; Docker gives 64 MiB unless it is told otherwise (--shm-size)"
        return Finding(name, "note", text, advice)
    return Finding(name, "good", text)


def _slot_pages(kernel: str, setting: str | None) -> Finding:
    name = "slots in huge pages"
    if setting is None or setting == "deny" or _numbers(kernel) < (6, 1):
        advice = "Linux 6.1 or later makes them, unless shmem_enabled is 'deny'"
        return Finding(name, "note", "no: the first save to each slot maps small pages", advice)
    return Finding(name, "good", "made when an agent starts")


def device_findings(devices: list[dict[str, Any]], problem: str | None) -> list[Finding]:
    """The CUDA devices, one by one.

    Args:
        devices: As the engine describes them.
        problem: Why the driver did not start, if that was tried in vain.
    """
    advice = "see whether 'nvidia-smi' answers, and what CUDA_VISIBLE_DEVICES holds"
    if problem is not None:
        return [Finding("GPUs", "note", problem, advice)]
    if devices:
        return [_device(device) for device in devices]
    nodes = sorted(name for name in _listed("/dev") if re.fullmatch(r"nvidia\d+", name))
    if not nodes:
        return [Finding("GPUs", "info", "no CUDA driver")]
    text = f"{formatting.count(len(nodes), 'NVIDIA GPU')} in this machine, but CUDA shows this process none"
    return [Finding("GPUs", "note", text, advice)]


def gpu_direct_findings(devices: list[dict[str, Any]], problem: str | None) -> list[Finding]:
    """Whether files can be read straight to the CUDA devices, if there are any.

    Args:
        devices: As the engine describes them.
        problem: Why not.
    """
    if not devices:
        return []
    name = "storage to GPU"
    if problem is None:
        return [Finding(name, "good", "files can be read past host memory (gpu_direct=True)")]
    return [Finding(name, "info", f"through host memory: {problem}")]


def _device(device: dict[str, Any]) -> Finding:
    major, minor = device["compute_capability"]
    text = (
        f"{device['name']}, {formatting.size(device['total_bytes'])}, compute capability {major}.{minor}, "
        f"PCI {device['pci_bus_id']}"
    )
    return Finding(f"GPU {device['ordinal']}", "good", text)


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


# ---- file system -------------------------------------------------------------------------------


def file_system_findings(probe: dict[str, Any]) -> list[Finding]:
    """What the file system of the probed directory can do."""
    found = probe["filesystem"]
    kind = f"{found['kind']} on {found['source']}, mounted at {found['mount_point']}"
    return [
        Finding("file system", "info", kind),
        _free(found),
        _writable(probe["writable"], found),
        _direct(probe),
        _answered(
            "cache look-ups",
            probe["nowait"],
            "can tell at once whether a file is cached",
            "reads cannot tell whether a file is cached",
        ),
        _answered(
            "atomic creation",
            probe["rename_new"],
            "a new checkpoint appears in one act and replaces nothing",
            "a rename that could replace an empty directory is used",
        ),
        _answered(
            "atomic overwrite",
            probe["rename_exchange"],
            "an overwritten checkpoint is swapped in one act",
            "overwriting replaces the record instead of the directory",
        ),
    ]


def _free(found: dict[str, Any]) -> Finding:
    text = f"{formatting.size(found['available_bytes'])} of {formatting.size(found['total_bytes'])}"
    if found["available_bytes"] < _LEAST_FREE_BYTES:
        return Finding(
            "free space", "note", text, "make room: a save that finds no space fails and leaves nothing"
        )
    return Finding("free space", "good", text)


def _writable(answer: dict[str, Any], found: dict[str, Any]) -> Finding:
    if answer["works"]:
        return Finding("writable", "good", "yes")
    advice = (
        "it is mounted read-only; remount it, or save elsewhere"
        if found["read_only"]
        else "check the permissions of the directory, or save elsewhere; loading works"
    )
    return Finding("writable", "bad", f"no ({answer['reason']})", advice)


def _direct(probe: dict[str, Any]) -> Finding:
    text = "reads and writes past the page cache"
    memory, offset = probe["direct_memory_alignment_bytes"], probe["direct_offset_alignment_bytes"]
    if memory is not None and offset is not None:
        text += f" (aligned to {memory} bytes in memory, {offset} in files)"
    return _answered("O_DIRECT", probe["direct"], text, "the page cache is used")


def _answered(
    name: str, answer: dict[str, Any], good: str, otherwise: str, advice: str | None = None
) -> Finding:
    if answer["works"]:
        return Finding(name, "good", good)
    if answer["works"] is None:
        return Finding(name, "info", f"could not be tried ({answer['reason']})")
    return Finding(name, "note", f"no ({answer['reason']}): {otherwise}", advice)
