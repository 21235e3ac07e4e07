"""Logs as JSON, metrics for Prometheus, traces for OpenTelemetry: one object per process, handed down."""

import logging
import re
import sys
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Literal

import structlog
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import DEFAULT_OFF, DEFAULT_ON
from opentelemetry.trace import SpanContext, Status, StatusCode, Tracer, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from penstock import __version__
from penstock.kernel.tasks.outcome import Outcome
from penstock.kernel.telemetry.build import code_commit
from penstock.kernel.telemetry.log_level import LOG_LEVEL
from penstock.kernel.text import HIDDEN

disable_created_metrics()  # type: ignore[no-untyped-call] # a series more for each, and nobody asks for them
LogFormat = Literal["auto", "json", "console"]
TRACEPARENT = "traceparent"  # the header of W3C's Trace Context
_CONTEXTS = TraceContextTextMapPropagator()
_LEVELS = logging.getLevelNamesMapping()
_TELLING = r"(?:password|passwd|secret|token|authorization|api_?key|credential)"
_SECRET = re.compile(_TELLING, re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(\w+://[^:/@\s]*):[^\s'\"]+@")
_URL_PARAMETER = re.compile(rf"([?&][^=&\s]*{_TELLING}[^=&\s]*)=[^&\s'\"]+", re.IGNORECASE)


class WorkMetrics:
    """What the work loops of a process did."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._items = Counter(
            "penstock_work_items",
            "Items handled, by queue and outcome",
            ["queue", "outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "penstock_work_batch_seconds", "Time to handle one batch", ["queue"], registry=registry
        )

        self._dead = Counter("penstock_bus_dead_letters", "Messages set aside, by topic", ["topic"], registry=registry)

    def dead_letters(self, topic: str) -> Callable[[float], None]:
        """Where those of *topic* are counted; from now on it is there, so that the first one is noticed."""
        return self._dead.labels(topic).inc

    @contextmanager
    def timed(self, queue: str) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self._seconds.labels(queue).observe(perf_counter() - began)

    def count(self, queue: str, outcomes: Sequence[Outcome | None], lost: int) -> None:
        names = Tally("given_back" if outcome is None else type(outcome).__name__.lower() for outcome in outcomes)
        for name, number in names.items():
            self._items.labels(queue, name).inc(number)
        self._items.labels(queue, "superseded").inc(lost)


class HealthMetrics:
    """How the process is, as its metrics tell it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._is_ready = Gauge("penstock_ready", "1 when it is ready", registry=registry)
        self._is_up = Gauge(
            "penstock_component_up", "1 when what it depends on does well", ["component"], registry=registry
        )
        self._is_refused = Gauge(
            "penstock_config_invalid",
            "1 while the configuration file is wrong and the one before is in force",
            registry=registry,
        )
        self._build = Gauge("penstock_build_info", "Which code this is", ["version", "commit"], registry=registry)

    def tell(self, components: Mapping[str, bool], *, is_ready: bool) -> None:
        """What is so now; in a process with several servers each tells its own, just before it is read."""
        self._is_ready.set(is_ready)
        self._is_up.clear()
        for name, is_up in components.items():
            self._is_up.labels(name).set(is_up)
        self._build.labels(__version__, code_commit()).set(1)

    def refused(self, is_refused: bool) -> None:
        """Whether the configuration on disk is one that cannot be used."""
        self._is_refused.set(is_refused)


class Telemetry:
    """The metrics and the tracer of one process."""

    def __init__(self, service: str = "penstock", spans: Sequence[SpanProcessor] = ()) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.health = HealthMetrics(self.registry)
        self.work = WorkMetrics(self.registry)
        resource = Resource.create({"service.name": service, "service.version": __version__})
        # Without anybody to send them to no trace begins here; those of others are handed on.
        sampler = DEFAULT_ON if spans else DEFAULT_OFF
        self.provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        for processor in spans:
            self.provider.add_span_processor(processor)
        self.tracer: Tracer = self.provider.get_tracer("penstock", __version__)

    def trace(self, name: str, parent: str | None, began: int, error: str | None = None, **about: Any) -> None:
        """Add what was done from *began* (in ns) until now to the trace of *parent*; without one nobody follows it."""
        if parent is None:
            return
        context = _CONTEXTS.extract({TRACEPARENT: parent}, context=Context())
        known = {key: value for key, value in about.items() if value is not None}
        span = self.tracer.start_span(name, context, start_time=began, attributes=known)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def close(self) -> None:
        """Send what is still held back."""
        self.provider.shutdown()


def current_traceparent() -> str | None:
    """What runs now, as it is handed on to other processes; None when nobody follows it."""
    return _followed(get_current_span().get_span_context())


def normalize_traceparent(traceparent: str | None) -> str | None:
    """The trace that is named, in the one form it has; None when it is none, or nobody follows it."""
    if traceparent is None:
        return None
    parent = _CONTEXTS.extract({TRACEPARENT: traceparent}, context=Context())
    return _followed(get_current_span(parent).get_span_context())


def _followed(context: SpanContext) -> str | None:
    if not context.is_valid or not context.trace_flags.sampled:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def configure_logging(level: str = "INFO", format: LogFormat = "auto") -> None:  # noqa: A002 - the setting's own name
    """Send all logs of the process to standard error, structured, without secrets. Called once, by a program's main."""
    LOG_LEVEL.configure(level)
    for_people = sys.stderr.isatty() if format == "auto" else format == "console"
    renderer = _for_people() if for_people else structlog.processors.JSONRenderer()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,  # here, so that what it prints is redacted too
        _add_trace,
        redact,
    ]
    structlog.configure(
        processors=[_drop_what_is_below, *shared, renderer],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[_drop_private, renderer])
    )
    logging.basicConfig(handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # when a server starts and stops we say ourselves
    logging.getLogger("asyncpg").setLevel(logging.CRITICAL)  # that PostgreSQL is away, too, and without a traceback


def _drop_what_is_below(_logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    # Not the logger's class, which a logger keeps for good once something is bound to it.
    if _LEVELS.get(method.upper(), logging.ERROR) < LOG_LEVEL.number:
        raise structlog.DropEvent
    return event


def _for_people() -> Any:
    # Plain tracebacks: the rich ones print local variables, and with them secrets.
    plain = structlog.dev.plain_traceback
    return structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)


def redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Hide what a name gives away as secret, and passwords in URLs."""
    return {name: value if name.startswith("_") else _hidden(name, value) for name, value in event.items()}


def _hidden(name: str, value: Any) -> Any:
    if value is None:
        return None
    if _SECRET.search(name):
        return HIDDEN
    if isinstance(value, Mapping):
        return {str(key): _hidden(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_hidden("", inner) for inner in value]
    if isinstance(value, int | float):
        return value
    # Other objects, exceptions above all, are logged as their repr.
    text = value if isinstance(value, str) else repr(value)
    return _URL_PARAMETER.sub(rf"\1={HIDDEN}", _URL_PASSWORD.sub(rf"\1:{HIDDEN}@", text))


def _add_trace(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    context = get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = format(context.trace_id, "032x")
    return event


def _drop_private(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {name: value for name, value in event.items() if not name.startswith("_")}
