"""Measures of saves and loads for systems that watch programs: Prometheus, OpenTelemetry, and any logger.

Everything here begins with `subscribe`: an observer gets a `SaveStatistics`, a `LoadStatistics` or a
`TransferFailure` for every save and load that ends in this process. `prometheus` and `opentelemetry`
subscribe observers that count them and make spans of them; `measures` gives their numbers names, for any
other logger.

Invariants: nothing is measured, and no other package is imported, before it is asked for; an observer that
fails is logged and disturbs no save or load. Only this process is seen: in a program of several processes
each has its own measures. Hosts of the runtime save and load in processes of their own.
"""

from __future__ import annotations

import contextlib
import importlib
import time
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from waystation._arguments import require_function
from waystation._errors import Unsupported, WrongType
from waystation._extras import install_command
from waystation.training.reading import ReadingCheckpointer
from waystation.transfers.statistics import LoadStatistics, SaveStatistics, TransferFailure, observe

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer, TracerProvider
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

__all__ = [
    "PrometheusMetrics",
    "Subscription",
    "TransferFailure",
    "measures",
    "opentelemetry",
    "prometheus",
    "subscribe",
]

Ended: TypeAlias = LoadStatistics | SaveStatistics | TransferFailure

_INSTRUMENTATION = "waystation"

# From a small file in the page cache to a large model from a slow store, in seconds.
_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800)


class Subscription:
    """An observer that is called until this is closed; also a context manager.

    Args:
        end: Ends it.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def close(self) -> None:
        """Ends the subscription; idempotent."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def subscribe(observer: Callable[[Ended], object]) -> Subscription:
    """Calls a function with every save and load that ends in this process.

    A save gives one `SaveStatistics`, a load one `LoadStatistics` for each checkpointable, and what fails one
    `TransferFailure`. Saves to the memory tier, and loads from it, are among them; their `path` is text such
    as `step 5 in memory (epoch 1)`.

    Args:
        observer: Called in the thread in which the operation ends, with the context variables of the call
            that began it. The operation waits for it. What it raises is logged, and changes nothing.

    Returns:
        The subscription, which lasts until it is closed.

    Raises:
        WrongType: `observer` is not a function.
    """
    require_function("observer", observer)
    return Subscription(observe(observer))


def measures(ended: Ended) -> dict[str, float]:
    """The numbers of one save or load, by names that loggers of metrics take (`waystation/save_bytes`).

    Times are in seconds, sizes in bytes, speeds in bytes per second.

    Args:
        ended: What an observer or `on_statistics` was given.
    """
    return {f"waystation/{name}": float(number) for name, number in _numbers(ended).items()}


def _numbers(ended: Ended) -> dict[str, float]:
    if isinstance(ended, SaveStatistics):
        stages = {f"save_{stage}_seconds": seconds for stage, seconds in _stages(ended).items()}
        return {
            "save_bytes": ended.bytes_written,
            "save_shared_bytes": ended.bytes_shared,
            "save_seconds": ended.duration_s,
            "save_blocked_seconds": ended.blocked_s,
            **stages,
            "save_bytes_per_second": ended.bytes_per_s,
        }
    if isinstance(ended, LoadStatistics):
        return {
            "load_bytes": ended.bytes_read,
            "load_needed_bytes": ended.bytes_needed,
            "load_cached_bytes": ended.cached_bytes,
            "load_received_bytes": ended.bytes_received,
            "load_seconds": ended.duration_s,
            "load_bytes_per_second": _load_speed(ended),
            "load_repeated_requests": ended.repeated_requests,
        }
    return {f"{ended.operation}_failures": 1, f"{ended.operation}_failed_seconds": ended.duration_s}


def _stages(save: SaveStatistics) -> dict[str, float]:
    """How long each stage took, one after the other, in seconds."""
    return {
        "write": save.written_s,
        "sync": save.synced_s - save.written_s,
        "commit": save.duration_s - save.synced_s,
    }


def _load_speed(load: LoadStatistics) -> float:
    return load.bytes_needed / load.duration_s if load.duration_s else 0.0


def _tier(path: str) -> Literal["memory", "store", "directory"]:
    """Where something is, by its path: paths are absolute, and what is in memory has none."""
    if "://" in path:
        return "store"
    return "directory" if path.startswith("/") else "memory"


def _imported(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unsupported(
            f"waystation.telemetry needs the package of the module '{module}' ({error}): "
            f"{install_command('telemetry')}"
        ) from error


# ---- OpenTelemetry -----------------------------------------------------------------------------


def opentelemetry(tracer_provider: TracerProvider | None = None) -> Subscription:
    """Makes an OpenTelemetry span of every save and load.

    The spans are `waystation.load` and `waystation.save`. The latter has the spans `waystation.save.write`,
    `.sync` and `.commit` of its stages, and an event `unblocked` at the moment when the caller went on. A
    span's parent is the span in which the program called. Its attributes are `waystation.path`,
    `waystation.tier` and the numbers of `measures`, with a dot in the place of the slash. A failure has the
    status ERROR, the exception, and the attribute `error.type`.

    Args:
        tracer_provider: Where spans go; None for the global one.

    Returns:
        The subscription, which lasts until it is closed.

    Raises:
        Unsupported: `opentelemetry-api` is not installed.
    """
    trace = _imported("opentelemetry.trace")
    tracer = trace.get_tracer(_INSTRUMENTATION, tracer_provider=tracer_provider)
    return subscribe(lambda ended: _make_span(trace, tracer, ended))


def _make_span(trace: ModuleType, tracer: Tracer, ended: Ended) -> None:
    """Makes the span of what has just ended, with the times at which it began and ended."""
    ended_ns = time.time_ns()
    begun_ns = ended_ns - int(ended.duration_s * 1e9)
    name = "waystation.load" if isinstance(ended, LoadStatistics) else "waystation.save"
    attributes: dict[str, Any] = {"waystation.path": ended.path, "waystation.tier": _tier(ended.path)}
    if isinstance(ended, TransferFailure):
        name = f"waystation.{ended.operation}"
        attributes["error.type"] = ended.kind
    else:
        attributes |= {f"waystation.{measure}": number for measure, number in _numbers(ended).items()}
    span = tracer.start_span(name, attributes=attributes, start_time=begun_ns)
    if isinstance(ended, SaveStatistics):
        span.add_event("unblocked", timestamp=begun_ns + int(ended.blocked_s * 1e9))
        _make_stages(trace, tracer, span, ended, begun_ns)
    if isinstance(ended, TransferFailure):
        span.record_exception(ended.error, timestamp=ended_ns)
        span.set_status(trace.StatusCode.ERROR, str(ended.error))
    span.end(ended_ns)


def _make_stages(trace: ModuleType, tracer: Tracer, span: Span, save: SaveStatistics, begun_ns: int) -> None:
    within = trace.set_span_in_context(span)
    for stage, seconds in _stages(save).items():
        part = tracer.start_span(f"waystation.save.{stage}", context=within, start_time=begun_ns)
        begun_ns += int(seconds * 1e9)
        part.end(begun_ns)


# ---- Prometheus --------------------------------------------------------------------------------


def prometheus(registry: CollectorRegistry | None = None) -> PrometheusMetrics:
    """Counts saves and loads in metrics of `prometheus_client`, which serves them as the program says.

    Args:
        registry: Where the metrics are registered; None for the default registry of `prometheus_client`.

    Returns:
        The metrics, which count until they are closed.

    Raises:
        Unsupported: `prometheus_client` is not installed.
        ValueError: The registry has these metrics already, as of an earlier call: close that first.
    """
    client = _imported("prometheus_client")
    return PrometheusMetrics(client, client.REGISTRY if registry is None else registry)


class PrometheusMetrics(Subscription):
    """Metrics of the saves and loads of this process, and of the `Checkpointer`s that it is told to watch.

    Made by `prometheus`.
    """

    def __init__(self, client: ModuleType, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._until_closed = contextlib.ExitStack()
        with contextlib.ExitStack() as on_error:
            self._registered = on_error
            self._make_metrics(client)
            self._watched = _Watched()
            registry.register(self._watched)
            on_error.callback(registry.unregister, self._watched)
            on_error.enter_context(subscribe(self._count))
            self._until_closed = on_error.pop_all()
        super().__init__(self._until_closed.close)

    def _make_metrics(self, client: ModuleType) -> None:
        tier, operation = ["tier"], ["operation", "tier"]
        self._seconds = self._made(
            client.Histogram, "duration_seconds", "Time from the call to the end.", operation, _BUCKETS_S
        )
        self._failures = self._made(
            client.Counter, "failures_total", "Saves and loads that failed.", [*operation, "kind"]
        )
        self._speed = self._made(
            client.Gauge, "bytes_per_second", "Speed of the last one, from its call to its end.", operation
        )
        self._stages = self._made(
            client.Counter, "save_stage_seconds_total", "Time of saves in each stage.", [*tier, "stage"]
        )
        self._blocked = self._made(
            client.Counter, "save_blocked_seconds_total", "Time for which saves kept their callers.", tier
        )
        self._saved = self._made(client.Counter, "save_bytes_total", "Bytes of arrays written.", tier)
        self._shared = self._made(
            client.Counter, "save_shared_bytes_total", "Bytes that were shared, not written again.", tier
        )
        self._read = self._made(client.Counter, "load_bytes_total", "Bytes read from storage.", tier)
        self._needed = self._made(client.Counter, "load_needed_bytes_total", "Bytes that loads needed.", tier)
        self._cached = self._made(
            client.Counter, "load_cached_bytes_total", "Bytes from the cache of this machine.", tier
        )
        self._received = self._made(
            client.Counter, "load_received_bytes_total", "Bytes that other processes sent.", tier
        )
        self._repeated = self._made(
            client.Counter, "load_repeated_requests_total", "Requests that were sent again.", tier
        )

    def _made(self, kind: Any, name: str, help_text: str, labels: list[str], buckets: Any = None) -> Any:
        extra = {} if buckets is None else {"buckets": buckets}
        metric = kind(f"waystation_{name}", help_text, labels, registry=self._registry, **extra)
        self._registered.callback(self._registry.unregister, metric)
        return metric

    def watch(self, checkpointer: ReadingCheckpointer) -> None:
        """Also exports what a `Checkpointer` knows of its memory tier, its remote and its newest step.

        It is asked when the metrics are collected, for as long as the program keeps it.

        Args:
            checkpointer: A `waystation.training.Checkpointer`.

        Raises:
            WrongType: It is something else.
        """
        if not isinstance(checkpointer, ReadingCheckpointer):
            raise WrongType(
                f"checkpointer must be a waystation.training.Checkpointer, not {checkpointer!r:.60}"
            )
        self._watched.checkpointers.add(checkpointer)

    def _count(self, ended: Ended) -> None:
        tier = _tier(ended.path)
        if isinstance(ended, TransferFailure):
            self._failures.labels(ended.operation, tier, ended.kind).inc()
        elif isinstance(ended, SaveStatistics):
            self._seconds.labels("save", tier).observe(ended.duration_s)
            self._speed.labels("save", tier).set(ended.bytes_per_s)
            self._blocked.labels(tier).inc(ended.blocked_s)
            self._saved.labels(tier).inc(ended.bytes_written)
            self._shared.labels(tier).inc(ended.bytes_shared)
            for stage, seconds in _stages(ended).items():
                self._stages.labels(tier, stage).inc(max(seconds, 0.0))
        else:
            self._seconds.labels("load", tier).observe(ended.duration_s)
            self._speed.labels("load", tier).set(_load_speed(ended))
            self._read.labels(tier).inc(ended.bytes_read)
            self._needed.labels(tier).inc(ended.bytes_needed)
            self._cached.labels(tier).inc(ended.cached_bytes)
            self._received.labels(tier).inc(ended.bytes_received)
            self._repeated.labels(tier).inc(ended.repeated_requests)


class _Watched:
    """A collector of `prometheus_client`: what the `Checkpointer`s say that are watched."""

    def __init__(self) -> None:
        self.checkpointers: weakref.WeakSet[ReadingCheckpointer] = weakref.WeakSet()

    def describe(self) -> list[Metric]:
        """The names of the metrics, for the registry."""
        return list(self.collect())

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, help_text in _WATCHED_COUNTERS.items():
            families[name] = CounterMetricFamily(f"waystation_{name}", help_text, labels=["directory"])
        for name, (help_text, labels) in _WATCHED_GAUGES.items():
            families[name] = GaugeMetricFamily(f"waystation_{name}", help_text, labels=["directory", *labels])
        # Of several for one directory one is asked: no two samples may have the same labels.
        by_directory = {str(each.directory): each for each in list(self.checkpointers)}
        for directory, checkpointer in by_directory.items():
            for name, labels, number in _told(checkpointer):
                families[name].add_metric([directory, *labels], number)
        yield from families.values()


_WATCHED_COUNTERS = {
    "memory_saves_total": "Versions saved to memory.",
    "memory_failures_total": "Saves to memory that failed.",
    "memory_skipped_total": "Steps that were not saved to memory, so that training need not wait.",
    "memory_saved_bytes_total": "Bytes put into memory.",
    "memory_blocked_seconds_total": "Time for which saves to memory kept the program.",
    "memory_loads_total": "States loaded from memory.",
    "remote_uploads_total": "Steps uploaded to the remote.",
    "remote_uploaded_bytes_total": "Bytes uploaded to the remote.",
    "remote_failures_total": "Uploads that failed.",
}
_WATCHED_GAUGES: dict[str, tuple[str, list[str]]] = {
    "latest_step": ("The newest committed step.", []),
    "memory_last_saved_step": ("The newest step saved to memory.", []),
    "memory_recovery_seconds": ("Time of the last recovery from memory in each phase.", ["phase"]),
    "remote_waiting_steps": ("Steps that wait for their upload.", []),
}


def _told(checkpointer: ReadingCheckpointer) -> Iterator[tuple[str, list[str], float]]:
    """Names, further labels and numbers of what a `Checkpointer` has to say."""
    latest = checkpointer.latest
    if latest is not None:
        yield "latest_step", [], latest.step
    memory = checkpointer.tier_statistics
    if memory is not None:
        yield "memory_saves_total", [], memory.saves
        yield "memory_failures_total", [], memory.failures
        yield "memory_skipped_total", [], memory.skipped
        yield "memory_saved_bytes_total", [], memory.saved_bytes
        yield "memory_blocked_seconds_total", [], memory.blocked_s
        yield "memory_loads_total", [], memory.loads
        if memory.last_saved_step is not None:
            yield "memory_last_saved_step", [], memory.last_saved_step
        if memory.recovery is not None:
            for phase, seconds in memory.recovery.phases_s.items():
                yield "memory_recovery_seconds", [phase], seconds
    remote = checkpointer.remote_statistics
    if remote is not None:
        yield "remote_uploads_total", [], remote.uploads
        yield "remote_uploaded_bytes_total", [], remote.uploaded_bytes
        yield "remote_failures_total", [], remote.failures
        yield "remote_waiting_steps", [], len(remote.waiting)
