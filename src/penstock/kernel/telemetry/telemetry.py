"""Logs as JSON, metrics for Prometheus, traces for OpenTelemetry. Each process has one Telemetry object."""

import logging
import re
import sys
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
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
from penstock.kernel.telemetry.build import find_code_commit
from penstock.kernel.telemetry.console import ConsoleRenderer, supports_color
from penstock.kernel.telemetry.log_level import LOG_LEVEL
from penstock.kernel.text import HIDDEN

disable_created_metrics()  # type: ignore[no-untyped-call] # one more series per metric, without a use
LogFormat = Literal["auto", "json", "console"]
TRACEPARENT = "traceparent"  # the header of W3C's Trace Context
_CONTEXTS = TraceContextTextMapPropagator()
_LEVELS = logging.getLevelNamesMapping()
_MARKERS = r"(?:password|passwd|secret|token|authorization|api_?key|credential)"
_SECRET = re.compile(_MARKERS, re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(\w+://[^:/@\s]*):[^\s'\"]+@")
_URL_PARAMETER = re.compile(rf"([?&][^=&\s]*{_MARKERS}[^=&\s]*)=[^&\s'\"]+", re.IGNORECASE)


class WorkMetrics:
    """Metrics of the work loops of a process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._items = Counter(
            "penstock_work_items",
            "Items that workers have handled, by queue and outcome.",
            ["queue", "outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "penstock_work_batch_seconds",
            "Time to handle one batch of items, in seconds.",
            ["queue"],
            registry=registry,
        )
        self._dead = Counter(
            "penstock_bus_dead_letters",
            "Messages that were moved to the dead letters, by topic.",
            ["topic"],
            registry=registry,
        )

    def count_dead_letters(self, topic: str) -> Callable[[float], None]:
        """Return the function that counts the dead letters of *topic*; the series starts at 0, as alerts need it."""
        return self._dead.labels(topic).inc

    @contextmanager
    def time_batch(self, queue: str) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self._seconds.labels(queue).observe(perf_counter() - began)

    def count(self, queue: str, outcomes: Sequence[Outcome | None], lost: int) -> None:
        names = Tally("released" if outcome is None else type(outcome).__name__.lower() for outcome in outcomes)
        for name, number in names.items():
            self._items.labels(queue, name).inc(number)
        self._items.labels(queue, "superseded").inc(lost)


class HealthMetrics:
    """The health of the process as metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._is_ready = Gauge(
            "penstock_ready", "1 if the process is ready for requests or work, else 0.", registry=registry
        )
        self._is_up = Gauge(
            "penstock_component_up",
            "1 if the health check of the dependency passes, else 0.",
            ["component"],
            registry=registry,
        )
        self._is_config_invalid = Gauge(
            "penstock_config_invalid",
            "1 while the configuration file is invalid and the previous configuration is still active, else 0.",
            registry=registry,
        )
        self._build = Gauge(
            "penstock_build_info",
            "1, labelled with the version and the commit of the code.",
            ["version", "commit"],
            registry=registry,
        )

    def set_components(self, components: Mapping[str, bool], *, is_ready: bool) -> None:
        """Set the present health.

        In a process with several servers each sets its own, just before the metrics are read.
        """
        self._is_ready.set(is_ready)
        self._is_up.clear()
        for name, is_up in components.items():
            self._is_up.labels(name).set(is_up)
        self._build.labels(__version__, find_code_commit()).set(1)

    def set_config_invalid(self, is_invalid: bool) -> None:
        """Set whether the configuration file cannot be used."""
        self._is_config_invalid.set(is_invalid)


class Telemetry:
    """The metrics and the tracer of one process."""

    def __init__(self, service: str = "penstock", spans: Sequence[SpanProcessor] = ()) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.health = HealthMetrics(self.registry)
        self.work = WorkMetrics(self.registry)
        resource = Resource.create({"service.name": service, "service.version": __version__})
        # Without an exporter no trace starts here; the traces of callers are passed on.
        sampler = DEFAULT_ON if spans else DEFAULT_OFF
        self.provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        for processor in spans:
            self.provider.add_span_processor(processor)
        self.tracer: Tracer = self.provider.get_tracer("penstock", __version__)

    def trace(self, name: str, parent: str | None, began: int, error: str | None = None, **about: Any) -> None:
        """Add a span from *began* (in ns) until now to the trace *parent*; do nothing without a parent."""
        if parent is None:
            return
        context = _CONTEXTS.extract({TRACEPARENT: parent}, context=Context())
        attributes = {key: value for key, value in about.items() if value is not None}
        span = self.tracer.start_span(name, context, start_time=began, attributes=attributes)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()

    def format_metrics(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)

    def close(self) -> None:
        """Send the spans that are still buffered."""
        self.provider.shutdown()


def format_traceparent() -> str | None:
    """Return the traceparent of the current span for other processes; None if it is not sampled."""
    return _format_traceparent(get_current_span().get_span_context())


def normalize_traceparent(traceparent: str | None) -> str | None:
    """Return *traceparent* in its normal form; None if it is invalid or not sampled."""
    if traceparent is None:
        return None
    parent = _CONTEXTS.extract({TRACEPARENT: traceparent}, context=Context())
    return _format_traceparent(get_current_span(parent).get_span_context())


def _format_traceparent(context: SpanContext) -> str | None:
    if not context.is_valid or not context.trace_flags.sampled:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def configure_logging(level: str = "INFO", format: LogFormat = "auto") -> None:  # noqa: A002 - the name of the setting
    """Send all logs of the process to standard error, structured, without secrets.

    Call it once, in the main function.
    """
    LOG_LEVEL.configure(level)
    is_console = sys.stderr.isatty() if format == "auto" else format == "console"
    renderer: Any = ConsoleRenderer(colors=supports_color()) if is_console else structlog.processors.JSONRenderer()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,  # before redact, so that tracebacks are redacted too
        _add_trace,
        redact,
    ]
    structlog.configure(
        processors=[_drop_below_level, *shared, renderer],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[_drop_private, renderer])
    )
    logging.basicConfig(handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # Penstock logs the start and stop of servers itself
    logging.getLogger("asyncpg").setLevel(logging.CRITICAL)  # Penstock logs outages itself, without a traceback


def log_warnings_to_stderr() -> None:
    """Send warnings and errors to standard error, unless logging is configured.

    Commands print their data to standard output, where structlog logs by default.
    """
    if structlog.is_configured():
        return
    processors: list[Any] = [
        _drop_below_warning,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        redact,
        ConsoleRenderer(colors=False),
    ]
    # The present sys.stderr, not the one at import: tests replace it.
    structlog.configure(processors=processors, logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))


def _drop_below_warning(_logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if _LEVELS.get(method.upper(), logging.ERROR) < logging.WARNING:
        raise structlog.DropEvent
    return event


def _drop_below_level(_logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    # A processor and not a filtering logger class: a logger with bound values would keep its class when the level
    # changes.
    if _LEVELS.get(method.upper(), logging.ERROR) < LOG_LEVEL.number:
        raise structlog.DropEvent
    return event


def redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace values whose names mark them as secrets, and passwords in URLs."""
    return {name: value if name.startswith("_") else _redact_value(name, value) for name, value in event.items()}


def _redact_value(name: str, value: Any) -> Any:
    if value is None:
        return None
    if _is_secret(name):
        return HIDDEN
    if isinstance(value, str):
        return _redact_urls(value)
    if isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _redact_value(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_redact_value("", inner) for inner in value]
    return _redact_urls(repr(value))  # other objects, such as exceptions, are logged as their repr


@lru_cache(maxsize=1_000)
def _is_secret(name: str) -> bool:
    return _SECRET.search(name) is not None


def _redact_urls(text: str) -> str:
    # Most values are no URLs: a line per command would otherwise cost twice as much.
    if "://" in text:
        text = _URL_PASSWORD.sub(rf"\1:{HIDDEN}@", text)
    return _URL_PARAMETER.sub(rf"\1={HIDDEN}", text) if "=" in text else text


def _add_trace(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    context = get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = format(context.trace_id, "032x")
    return event


def _drop_private(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {name: value for name, value in event.items() if not name.startswith("_")}
