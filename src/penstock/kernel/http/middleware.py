"""Middleware of every request: an id, a log entry, metrics, and limits for size and origin."""

from collections.abc import Mapping
from time import perf_counter
from uuid import uuid4

import structlog
from prometheus_client import Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.kernel.errors import PenstockError, TooLarge
from penstock.kernel.http import problems
from penstock.kernel.http.headers import LOCAL_NAMES, is_request_id, refuse_foreign_page
from penstock.kernel.http.health import LivenessPulse
from penstock.kernel.telemetry.telemetry import Telemetry

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NOSNIFF = (b"x-content-type-options", b"nosniff")
_CLIENT_ERROR, _SERVER_ERROR = 400, 500


class HttpMetrics:
    """Metrics of requests by route, never by path: callers choose paths, so their number is unlimited."""

    def __init__(self, telemetry: Telemetry) -> None:
        names = ["method", "route", "status"]
        self.requests = Counter(
            "penstock_http_requests", "HTTP requests, by method, route and status.", names, registry=telemetry.registry
        )
        self.seconds = Histogram(
            "penstock_http_request_seconds",
            "Duration of an HTTP request in seconds, by method and route.",
            names[:2],
            registry=telemetry.registry,
        )


class RequestObserver:
    """Gives every request an id, a response even after a crash, a log entry and metrics."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The id of the caller if it is valid, so that the logs of several services can be joined; else a new one.
        sent_id = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
        request_id = scope["request_id"] = sent_id if is_request_id(sent_id) else uuid4().hex
        status, began = 0, perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode()), _NOSNIFF]
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception as error:
                if status:  # half of the response is sent: only a broken connection can signal the error
                    raise
                await problems.respond_to_bug(error, scope)(scope, receive, send_with_id)
            finally:
                self._record(scope, status, perf_counter() - began)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.requests.labels(method, route, status).inc()
        self._metrics.seconds.labels(method, route).observe(seconds)
        getattr(structlog.get_logger(), _choose_level(status))(
            "request_answered", method=method, path=scope["path"], status=status, seconds=round(seconds, 6)
        )


def _choose_level(status: int) -> str:
    """Return the log level of a response. A busy server must not hide its events behind successful requests."""
    if status == 0 or status >= _SERVER_ERROR:
        return "warning"
    return "info" if status >= _CLIENT_ERROR else "debug"


class DrainMiddleware:
    """Closes the connections of a process that is about to stop: with a response, not between two requests."""

    def __init__(self, app: ASGIApp, pulse: LivenessPulse) -> None:
        self._app = app
        self._pulse = pulse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start" and self._pulse.is_draining:
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, send_and_close)


class RequestLimits:
    """Refuses bodies over the limit and, if callers are not authenticated, requests from pages of other sites."""

    def __init__(self, app: ASGIApp, body_limit: int, local_name: str | None) -> None:
        self._app = app
        self._limit = body_limit
        self._local_names = None if local_name is None else LOCAL_NAMES | {local_name}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._check_headers({name: value.decode("latin-1") for name, value in scope["headers"]})
        if refusal is None:
            refusal = await self._run_limited(scope, receive, send)
        if refusal is not None:
            await problems.respond(refusal, scope)(scope, receive, send)

    def _check_headers(self, headers: Mapping[bytes, str]) -> PenstockError | None:
        length = headers.get(b"content-length", "0")
        if length.isdigit() and int(length) > self._limit:
            return self._make_size_error()
        return None if self._local_names is None else refuse_foreign_page(headers, self._local_names)

    async def _run_limited(self, scope: Scope, receive: Receive, send: Send) -> PenstockError | None:
        """Run the application and count the bytes of the body; a response to a body that was cut off is not sent."""
        size, is_answered = 0, False

        async def receive_counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                raise self._make_size_error()
            return message

        async def send_unless_over(message: Message) -> None:
            nonlocal is_answered
            if size <= self._limit or is_answered:
                is_answered = True
                await send(message)

        try:
            await self._app(scope, receive_counted, send_unless_over)
        except TooLarge:
            if is_answered:
                raise
        return self._make_size_error() if size > self._limit and not is_answered else None

    def _make_size_error(self) -> TooLarge:
        hint = "send the content in several requests, or raise server.body_limit"
        return TooLarge("BODY_TOO_LARGE", f"the body has more than {self._limit} bytes (server.body_limit)", hint=hint)
