"""`waystation doctor` and the way into `waystation demo`, which has tests of its own."""

from pathlib import Path
from typing import Any

import pytest

from waystation import _native, memory
from waystation.cli import findings
from waystation.cli.commands import doctor


def test_every_line_has_a_verdict_and_what_is_not_good_has_advice(tmp_path: Path, script) -> None:
    outcome = script("doctor", tmp_path, "--json")
    assert outcome.code == 0
    found = {finding["name"]: finding for finding in outcome.document["findings"]}
    expected = {
        "python",
        "numpy",
        "jax",
        "torch",
        "io_uring",
        "O_DIRECT",
        "huge pages",
        "locked memory",
        "ray",
        "tensorstore",
        "agent",
        "memory for slots",
        "slots in huge pages",
    }
    assert expected <= found.keys()
    assert {"file system", "free space", "writable", "arena", "measured speed"} <= found.keys()
    assert {finding["verdict"] for finding in found.values()} <= {"good", "info", "note"}
    assert found["measured speed"]["advice"].startswith("run 'waystation doctor --tune ")
    assert outcome.document["probe"]["cores"] == _native.probe(str(tmp_path))["cores"]
    assert outcome.document["calibration"] is None
    assert outcome.document["arena"].keys() == _native.arena_statistics().keys()
    devices = outcome.document["devices"]
    assert [name for name in found if name.startswith("GPU")] == (
        [f"GPU {device['ordinal']}" for device in devices] or ["GPUs"]
    )


def test_the_text_has_a_line_for_each(tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAYSTATION_CACHE_DIR", str(tmp_path / "cache"))
    outcome = run("doctor", tmp_path)
    titles = [line for line in outcome.out.splitlines() if line and not line.startswith(" ")]
    assert titles == ["programs", "machine", "memory tier", "file system of [DIR]"]
    assert "  ✓ python" in outcome.out
    assert "  ! measured speed" in outcome.out
    assert "→ run 'waystation doctor --tune [DIR]' once" in outcome.out


def test_tuning_is_remembered(tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAYSTATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "PROBE_BYTES", 4 << 20)
    tuned = run("doctor", tmp_path, "--tune", "--json").document
    again = run("doctor", tmp_path, "--json").document
    for document in (tuned, again):
        (speed,) = [found for found in document["findings"] if found["name"] == "measured speed"]
        assert speed["verdict"] == "good"
        assert "in flight" in speed["finding"]
    assert tuned["calibration"]["write"]["best"] == again["calibration"]["write"]["best"]


def test_whether_files_go_straight_to_gpus_is_told() -> None:
    device: dict[str, Any] = {"ordinal": 0}
    assert findings.gpu_direct_findings([], None) == []
    (works,) = findings.gpu_direct_findings([device], None)
    (fails,) = findings.gpu_direct_findings([device], "there is no cuFile library here")
    assert works.verdict == "good"
    assert (fails.verdict, fails.text) == ("info", "through host memory: there is no cuFile library here")


def changed(probe: dict[str, Any], **answers: Any) -> dict[str, Any]:
    return probe | answers


REFUSED = {"works": False, "reason": "Operation not permitted"}


@pytest.fixture
def probe(tmp_path: Path) -> dict[str, Any]:
    return _native.probe(str(tmp_path))


def by_name(found: list[findings.Finding]) -> dict[str, findings.Finding]:
    return {finding.name: finding for finding in found}


def test_what_is_lacking_is_a_note(probe: dict[str, Any]) -> None:
    lacking = changed(
        probe, io_uring=REFUSED, huge_pages="never", locked_memory_limit_bytes=65536, direct=REFUSED
    )
    machine = by_name(findings.machine_findings(lacking, _native.arena_statistics()))
    assert machine["io_uring"].verdict == "note"
    assert machine["io_uring"].text == "no (Operation not permitted): threads are used instead"
    assert "seccomp" in str(machine["io_uring"].advice)
    assert "madvise" in str(machine["huge pages"].advice)
    assert "ulimit -l" in str(machine["locked memory"].advice)
    files = by_name(findings.file_system_findings(lacking))
    assert files["O_DIRECT"].text == "no (Operation not permitted): the page cache is used"
    untried = findings.file_system_findings(changed(probe, nowait={"works": None, "reason": "no file"}))
    assert by_name(untried)["cache look-ups"].verdict == "info"


def test_what_the_memory_tier_lacks_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmpfs = {"kind": "tmpfs", "available_bytes": 8 << 30, "total_bytes": 9 << 30}
    found = by_name(findings.memory_tier_findings(tmpfs, "6.1.0-generic", "never"))
    assert {finding.verdict for finding in found.values()} == {"good"}
    assert found["agent"].text == str(memory.agent_program())

    small = tmpfs | {"available_bytes": 64 << 20, "total_bytes": 64 << 20}
    found = by_name(findings.memory_tier_findings(small, "5.15.0", "advise"))
    assert "--shm-size" in str(found["memory for slots"].advice)
    assert "Linux 6.1" in str(found["slots in huge pages"].advice)
    found = by_name(findings.memory_tier_findings(None, "6.18.1", "deny"))
    assert found["memory for slots"].text == "/dev/shm is not a tmpfs"
    assert found["slots in huge pages"].verdict == "note"

    program = tmp_path / "agent"
    program.write_text("#!/bin/sh\necho waystation-agent 0.0.1\n")
    program.chmod(0o755)
    monkeypatch.setenv("WAYSTATION_AGENT", str(program))
    agent = by_name(findings.memory_tier_findings(tmpfs, "6.1.0", "never"))["agent"]
    assert (agent.verdict, agent.text) == ("note", f"{program} is of another release: waystation-agent 0.0.1")
    monkeypatch.setenv("WAYSTATION_AGENT", str(tmp_path / "none"))
    agent = by_name(findings.memory_tier_findings(tmpfs, "6.1.0", "never"))["agent"]
    assert "which is not an executable file" in agent.text


def test_devices_are_listed_one_by_one() -> None:
    device = {
        "ordinal": 1,
        "name": "NVIDIA H100 80GB HBM3",
        "total_bytes": 79 << 30,
        "pci_bus_id": "0000:04:00.0",
        "compute_capability": (9, 0),
    }
    found = findings.device_findings([device | {"ordinal": 0}, device], None)
    assert [finding.name for finding in found] == ["GPU 0", "GPU 1"]
    assert found[1].text == "NVIDIA H100 80GB HBM3, 79.0 GiB, compute capability 9.0, PCI 0000:04:00.0"
    (failed,) = findings.device_findings([], "the CUDA driver did not start: unknown error")
    assert (failed.name, failed.verdict, failed.text) == (
        "GPUs",
        "note",
        "the CUDA driver did not start: unknown error",
    )
    assert "nvidia-smi" in str(failed.advice)


def test_no_cuda_driver_is_no_problem(tmp_path: Path, script) -> None:
    if _native.devices():
        pytest.skip("this machine has a CUDA device")
    document = script("doctor", tmp_path, "--json").document
    (found,) = [finding for finding in document["findings"] if finding["name"] == "GPUs"]
    if found["verdict"] != "note":  # a machine whose devices this process may not use
        assert (found["verdict"], found["finding"]) == ("info", "no CUDA driver")
    assert document["devices"] == []


def test_a_place_that_cannot_be_written_is_bad(probe: dict[str, Any]) -> None:
    writable = by_name(findings.file_system_findings(changed(probe, writable=REFUSED)))["writable"]
    assert (writable.verdict, writable.text) == ("bad", "no (Operation not permitted)")
    assert "permissions" in str(writable.advice)


def test_versions_of_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    present = {"waystation": "0.1.0", "numpy": "1.26.4", "jax": "0.6.2", "torch": None}
    monkeypatch.setattr(findings, "_version", present.get)
    found = by_name(findings.program_findings())
    assert (found["numpy"].verdict, found["numpy"].advice) == ("bad", "pip install 'numpy>=2.0'")
    assert found["jax"].verdict == "note"
    assert found["torch"].text == "not installed (pip install 'torch>=2.6')"


def test_a_path_that_is_not_there(tmp_path: Path, run) -> None:
    outcome = run("doctor", tmp_path / "absent")
    assert outcome.code == 2
    assert outcome.err.startswith("error: ")


def test_the_demo_leaves_the_files_of_others_alone(tmp_path: Path, script) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    outcome = script("demo", "--output", "mine", "--json")
    assert outcome.code == 2
    assert outcome.document["error"]["kind"] == "Conflict"
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"
