"""Saves and loads as metrics of Prometheus, spans of OpenTelemetry, and numbers for any logger: with the real
packages, whose registries and exporters keep everything in memory."""

import functools
import importlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_client
import pytest
import safetensors.numpy
import torch

import waystation
from waystation import telemetry
from waystation.compat import safetensors_torch
from waystation.training import Checkpointer, Remote

STATE = {"w": np.arange(1000, dtype=np.float32), "step": 3}
STATE_BYTES = 4000


# ---- observers ---------------------------------------------------------------------------------


def test_an_observer_hears_of_everything_that_ends(tmp_path: Path) -> None:
    seen: list[Any] = []
    with telemetry.subscribe(seen.append):
        waystation.save(tmp_path / "a", STATE)
        waystation.save_async(tmp_path / "b", STATE).result()
        waystation.load(tmp_path / "a")
        waystation.load_async(tmp_path / "b").result()
        waystation.load_checkpointables(tmp_path / "a")
    waystation.load(tmp_path / "a")
    assert [(type(ended).__name__, Path(ended.path).name) for ended in seen] == [
        ("SaveStatistics", "a"),
        ("SaveStatistics", "b"),
        ("LoadStatistics", "a"),
        ("LoadStatistics", "b"),
        ("LoadStatistics", "a"),
    ]


@pytest.mark.parametrize("in_background", [False, True])
def test_an_observer_hears_of_each_failure_once(in_background: bool, tmp_path: Path) -> None:
    waystation.save(tmp_path / "a", STATE)
    (data,) = (tmp_path / "a" / "state").glob("*.safetensors")
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    seen: list[Any] = []
    save = waystation.save_async if in_background else waystation.save
    load = waystation.load_async if in_background else waystation.load
    with telemetry.subscribe(seen.append):
        with pytest.raises(waystation.errors.Conflict):
            save(tmp_path / "a", STATE)
        with pytest.raises(waystation.errors.Unsupported):
            save(tmp_path / "b", {"f": print})
        with pytest.raises(waystation.errors.NotFound):
            load(tmp_path / "absent")
        if in_background:
            damaged = waystation.load_async(tmp_path / "a")
            with pytest.raises(waystation.errors.Corrupt):
                damaged.result()
        else:
            with pytest.raises(waystation.errors.Corrupt):
                waystation.load(tmp_path / "a")
    assert all(isinstance(ended, telemetry.TransferFailure) for ended in seen)
    assert [(ended.operation, Path(ended.path).name, ended.kind) for ended in seen] == [
        ("save", "a", "Conflict"),
        ("save", "b", "Unsupported"),
        ("load", "absent", "NotFound"),
        ("load", "a", "Corrupt"),
    ]
    assert all(0 <= ended.duration_s < 60 for ended in seen)


def test_published_models_are_observed(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"w": STATE["w"]}, tmp_path / "model.safetensors")
    seen: list[Any] = []
    with telemetry.subscribe(seen.append):
        waystation.safetensors.load(tmp_path / "model.safetensors", framework="numpy")
    (loaded,) = seen
    assert loaded.path == str(tmp_path / "model.safetensors")
    assert telemetry.measures(loaded)["waystation/load_needed_bytes"] == STATE_BYTES


def test_streams_of_published_models_are_observed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(dict.fromkeys("abc", STATE["w"]), path)
    stream = partial(waystation.safetensors.stream, path, framework="numpy")
    seen: list[Any] = []
    with telemetry.subscribe(seen.append):
        assert len(list(stream())) == 3
        broken_off = stream()
        next(broken_off)
        broken_off.close()
        failing = stream()
        next(failing)
        with pytest.raises(RuntimeError, match="mine"):
            failing.throw(RuntimeError("mine"))
        stream().close()  # of which nothing was read
    assert [(type(ended).__name__, ended.path) for ended in seen] == [
        ("LoadStatistics", str(path)),
        ("LoadStatistics", str(path)),
        ("TransferFailure", str(path)),
    ]
    assert seen[0].bytes_needed == 3 * STATE_BYTES
    assert seen[2].kind == "RuntimeError"


def test_a_load_that_fails_as_it_opens_the_model_is_observed_once(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * 100)
    model = waystation.safetensors
    seen: list[Any] = []
    calls = [model.load, model.load_async, model.stream]
    with telemetry.subscribe(seen.append):
        for call in calls:
            with pytest.raises(waystation.errors.Corrupt):
                call(path, framework="numpy")
        with pytest.raises(waystation.errors.NotFound):
            model.load([path.with_name("a"), path.with_name("b")], framework="numpy")
    assert [(ended.operation, ended.kind, ended.path) for ended in seen] == [
        *[("load", "Corrupt", str(path))] * 3,
        ("load", "NotFound", str(tmp_path)),
    ]


def test_saves_of_published_models_are_observed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    seen: list[Any] = []
    given: list[Any] = []
    context = waystation.Context()
    context.array.saving.on_statistics = given.append
    with telemetry.subscribe(seen.append), context:
        waystation.safetensors.save({"w": STATE["w"]}, path)
        with pytest.raises(waystation.errors.Conflict):
            waystation.safetensors.save({"w": STATE["w"]}, path)
        with pytest.raises(waystation.errors.UnsupportedLeaf):
            waystation.safetensors.save({"w": "text"}, path, overwrite=True)
    saved, conflict, refused = seen
    assert given == [saved]
    assert (saved.path, saved.bytes_written) == (str(path), path.stat().st_size)
    assert 0 < saved.written_s < saved.synced_s <= saved.duration_s == saved.blocked_s
    assert (conflict.operation, conflict.kind, refused.kind) == ("save", "Conflict", "Unsupported")


@pytest.mark.parametrize("framework", ["numpy", "torch", "flax"])
def test_the_functions_of_the_safetensors_package_are_observed(tmp_path: Path, framework: str) -> None:
    doors = importlib.import_module(f"waystation.compat.safetensors_{framework}")
    make = importlib.import_module({"flax": "jax.numpy"}.get(framework, framework)).ones
    path = tmp_path / "model.safetensors"
    seen: list[Any] = []
    given: list[Any] = []
    context = waystation.Context()
    context.array.saving.on_statistics = context.array.loading.on_statistics = given.append
    with telemetry.subscribe(seen.append), context:
        doors.save_file({"w": make(1000)}, path)
        doors.load_file(path)
        for call in (doors.load_file, functools.partial(doors.save_file, {"w": make(3)})):
            with pytest.raises((waystation.errors.NotFound, OSError)):
                call(tmp_path / "absent" / "model.safetensors")
        with pytest.raises(waystation.errors.WaystationError):
            doors.save_file({"w": 3}, path)
    saved, loaded, *failed = seen
    assert given == [saved, loaded]
    assert (saved.path, saved.bytes_written) == (str(path), path.stat().st_size)
    assert 0 < saved.written_s < saved.synced_s <= saved.duration_s == saved.blocked_s
    assert (loaded.path, loaded.bytes_needed) == (str(path), make(1000).nbytes)
    assert [ended.operation for ended in failed] == ["load", "save", "save"]
    assert all(isinstance(ended, telemetry.TransferFailure) for ended in failed)


def test_saves_of_modules_are_observed(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 3)
    parts = torch.nn.Module()
    whole = torch.zeros(4)
    parts.a, parts.b = torch.nn.Parameter(whole[:3]), torch.nn.Parameter(whole[1:])
    seen: list[Any] = []
    with telemetry.subscribe(seen.append):
        safetensors_torch.save_model(module, tmp_path / "model.safetensors")
        safetensors_torch.load_model(module, tmp_path / "model.safetensors")
        with pytest.raises(RuntimeError, match="share memory"):
            safetensors_torch.save_model(parts, tmp_path / "model.safetensors")
    assert [type(ended).__name__ for ended in seen] == ["SaveStatistics", "LoadStatistics", "TransferFailure"]


def test_what_ended_well_is_a_success_whatever_its_own_function_raises(tmp_path: Path) -> None:
    """Of checkpoints and published models, also in the background, and where a stream is closed early."""
    model = waystation.safetensors
    path = tmp_path / "model.safetensors"

    def closed_early() -> None:
        stream = model.stream(path, framework="numpy")
        next(stream)
        stream.close()

    calls: list[tuple[Callable[[], object], type[object]]] = [
        (lambda: waystation.save(tmp_path / "checkpoint", STATE), waystation.SaveStatistics),
        (lambda: waystation.load(tmp_path / "checkpoint"), waystation.LoadStatistics),
        (lambda: waystation.load_async(tmp_path / "checkpoint").result(), waystation.LoadStatistics),
        (lambda: model.save({"w": STATE["w"]}, path), waystation.SaveStatistics),
        (lambda: model.load(path, framework="numpy"), waystation.LoadStatistics),
        (lambda: model.load_async(path, framework="numpy").result(), waystation.LoadStatistics),
        (lambda: list(model.stream(path, framework="numpy")), waystation.LoadStatistics),
        (closed_early, waystation.LoadStatistics),
    ]

    def fail(_: object) -> None:
        raise RuntimeError("no metrics today")

    context = waystation.Context()
    context.array.saving.on_statistics = context.array.loading.on_statistics = fail
    for call, kind in calls:
        seen: list[Any] = []
        with telemetry.subscribe(seen.append), context, pytest.raises(RuntimeError, match="no metrics"):
            call()
        assert list(map(type, seen)) == [kind]


def test_an_observer_that_fails_disturbs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no metrics today")

    with telemetry.subscribe(fail):
        waystation.save(tmp_path / "a", STATE)
    assert waystation.is_checkpoint(tmp_path / "a")
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage() == (
        f"an observer of saves and loads has failed; '{tmp_path}/a' is not affected"
    )
    with pytest.raises(waystation.errors.WrongType, match="observer must be a function"):
        telemetry.subscribe(3)  # type: ignore[arg-type]


def test_the_log_has_a_line_of_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "waystation"):
        waystation.save(tmp_path / "a", STATE)
        waystation.load(tmp_path / "a")
        with pytest.raises(waystation.errors.NotFound):
            waystation.load(tmp_path / "absent")
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" ")[0] for line in lines] == ["saved", "loaded", "load"]
    assert lines[2].startswith(f"load of '{tmp_path}/absent' failed after 0.")


def test_measures_are_numbers_with_names() -> None:
    save = waystation.SaveStatistics("/run/5", 8000, 0.5, 1.0, 1.5, 2.0, bytes_shared=100)
    assert telemetry.measures(save) == {
        "waystation/save_bytes": 8000.0,
        "waystation/save_shared_bytes": 100.0,
        "waystation/save_seconds": 2.0,
        "waystation/save_blocked_seconds": 0.5,
        "waystation/save_write_seconds": 1.0,
        "waystation/save_sync_seconds": 0.5,
        "waystation/save_commit_seconds": 0.5,
        "waystation/save_bytes_per_second": 4000.0,
    }
    failure = telemetry.TransferFailure("load", "/run/5", 3.0, OSError("gone"))
    assert failure.kind == "OSError"
    assert telemetry.measures(failure) == {
        "waystation/load_failures": 1.0,
        "waystation/load_failed_seconds": 3.0,
    }
    load = telemetry.measures(waystation.LoadStatistics("/run/5", 100, 200, 4.0))
    assert load["waystation/load_bytes_per_second"] == 25.0


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    program = """
import sys, waystation
from waystation import telemetry
telemetry.subscribe(print).close()
assert not {"prometheus_client", "opentelemetry"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("begin", "module"),
    [(telemetry.prometheus, "prometheus_client"), (telemetry.opentelemetry, "opentelemetry.trace")],
)
def test_a_missing_package_is_named(begin: Any, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name == module:
            raise ImportError(f"No module named '{name}'")
        return found(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(waystation.errors.Unsupported, match=r"pip install .*prometheus-client"):
        begin()


# ---- Prometheus --------------------------------------------------------------------------------


@pytest.fixture
def registry() -> prometheus_client.CollectorRegistry:
    return prometheus_client.CollectorRegistry()


def test_prometheus_counts_saves_loads_and_failures(
    tmp_path: Path, registry: prometheus_client.CollectorRegistry
) -> None:
    with telemetry.prometheus(registry):
        waystation.save(tmp_path / "a", STATE)
        waystation.save(tmp_path / "b", STATE)
        waystation.load(tmp_path / "a")
        with pytest.raises(waystation.errors.Conflict):
            waystation.save(tmp_path / "a", STATE)

        def sample(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"waystation_{name}", {"tier": "directory", **labels})

        assert sample("duration_seconds_count", operation="save") == 2
        assert sample("duration_seconds_count", operation="load") == 1
        assert sample("failures_total", operation="save", kind="Conflict") == 1
        written = sample("save_bytes_total")
        assert written is not None
        assert written >= 2 * STATE_BYTES  # with headers and padding
        assert sample("save_shared_bytes_total") == 0
        assert sample("load_needed_bytes_total") == STATE_BYTES
        total = sample("duration_seconds_sum", operation="save")
        stages = [sample("save_stage_seconds_total", stage=each) for each in ("write", "sync", "commit")]
        assert sum(stages) == pytest.approx(total)  # type: ignore[arg-type]
        assert sample("save_blocked_seconds_total") == pytest.approx(total)
        assert (sample("bytes_per_second", operation="save") or 0) > 0
        with pytest.raises(ValueError, match="Duplicated"):
            telemetry.prometheus(registry)
        waystation.save(tmp_path / "c", STATE)
        assert sample("save_bytes_total") == 1.5 * written
    assert list(registry.collect()) == []
    with telemetry.prometheus(registry):  # once it is closed, it can be made anew
        pass


def test_prometheus_asks_a_checkpointer_that_is_watched(
    tmp_path: Path, registry: prometheus_client.CollectorRegistry
) -> None:
    directory = str(tmp_path / "run")
    with telemetry.prometheus(registry) as metrics:
        with Checkpointer(directory, remote=Remote(tmp_path / "far")) as checkpointer:
            metrics.watch(checkpointer)
            metrics.watch(checkpointer)
            for step in (1, 2):
                checkpointer.save(step, STATE)
            checkpointer.wait()

            def sample(name: str) -> float | None:
                return registry.get_sample_value(f"waystation_{name}", {"directory": directory})

            assert sample("latest_step") == 2
            assert sample("remote_uploads_total") == 2
            assert (sample("remote_uploaded_bytes_total") or 0) >= 2 * STATE_BYTES
            assert sample("remote_failures_total") == 0
            assert sample("remote_waiting_steps") == 0
            assert sample("memory_saves_total") is None  # it has no memory tier
        del checkpointer
        assert registry.get_sample_value("waystation_latest_step", {"directory": directory}) is None
        with pytest.raises(waystation.errors.WrongType, match="Checkpointer"):
            metrics.watch("run")  # type: ignore[arg-type]


# ---- OpenTelemetry -----------------------------------------------------------------------------


@pytest.fixture
def tracing() -> Iterator[tuple[Any, Any]]:
    """A provider of the SDK, and its exporter."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = importlib.import_module("opentelemetry.sdk.trace.export")
    memory = importlib.import_module("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    yield provider, exporter
    provider.shutdown()


def test_spans_of_a_save_in_the_background_and_of_a_load(tmp_path: Path, tracing: tuple[Any, Any]) -> None:
    provider, exporter = tracing
    step = provider.get_tracer("program").start_as_current_span("step")
    with telemetry.opentelemetry(provider), step:
        saving = waystation.save_async(tmp_path / "a", STATE)
        saving.result()
        waystation.load(tmp_path / "a")
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans.keys() == {
        "step",
        "waystation.load",
        "waystation.save",
        *(f"waystation.save.{stage}" for stage in ("write", "sync", "commit")),
    }
    save, step_id = spans["waystation.save"], spans["step"].context.span_id
    assert save.parent.span_id == spans["waystation.load"].parent.span_id == step_id
    assert save.attributes["waystation.path"] == str(tmp_path / "a")
    assert save.attributes["waystation.tier"] == "directory"
    assert save.attributes["waystation.save_bytes"] >= STATE_BYTES
    assert spans["waystation.load"].attributes["waystation.load_needed_bytes"] == STATE_BYTES
    (event,) = save.events
    assert event.name == "unblocked"
    assert save.start_time < event.timestamp <= save.end_time
    stages = [spans[f"waystation.save.{stage}"] for stage in ("write", "sync", "commit")]
    assert all(stage.parent.span_id == save.context.span_id for stage in stages)
    times = [save.start_time, *(time for stage in stages for time in (stage.start_time, stage.end_time))]
    assert times == sorted(times)
    assert abs(save.end_time - times[-1]) < 1000  # nanoseconds, for rounding


def test_the_span_of_a_failure(tmp_path: Path, tracing: tuple[Any, Any]) -> None:
    provider, exporter = tracing
    with telemetry.opentelemetry(provider), pytest.raises(waystation.errors.NotFound):
        waystation.load(tmp_path / "absent")
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.status.status_code.name) == ("waystation.load", "ERROR")
    assert span.attributes["error.type"] == "NotFound"
    assert [event.name for event in span.events] == ["exception"]
