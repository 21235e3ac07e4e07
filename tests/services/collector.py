"""A collector of traces: OTLP over HTTP, as any process may send them."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Span(NamedTuple):
    """What a process says of one stage."""

    name: str
    trace: str
    id: str
    parent: str
    began: int
    ended: int
    about: dict[str, Any]


class Collector(AbstractContextManager["Collector"]):
    """Keeps what is sent to it."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._came = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector._keep(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing: what comes is kept."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    @property
    def env(self) -> dict[str, str]:
        """What a process needs to send its traces here, at once."""
        return {"PENSTOCK__TELEMETRY__OTLP_ENDPOINT": self.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "20"}

    def of(self, trace: str, *names: str) -> list[Span]:
        """The spans of a trace, once each of *names* is among them."""

        def found() -> list[Span]:
            return [span for span in self._spans if span.trace == trace]

        return self._once(found, names)

    def about(self, event_id: str, *names: str) -> list[Span]:
        """The spans that tell of an event, once each of *names* is among them."""

        def found() -> list[Span]:
            return [span for span in self._spans if span.about.get("eventId") == event_id]

        return self._once(found, names)

    def _once(self, found: Callable[[], list[Span]], names: Sequence[str]) -> list[Span]:
        with self._came:
            is_complete = self._came.wait_for(lambda: {*names} <= {span.name for span in found()}, timeout=30)
            assert is_complete, found()
            return found()

    def _keep(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._came:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self._spans += [_span(span) for span in scope.spans]
            self._came.notify_all()


def _span(span: Any) -> Span:
    about = {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}
    began, ended = span.start_time_unix_nano, span.end_time_unix_nano
    return Span(span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), began, ended, about)
