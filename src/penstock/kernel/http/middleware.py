"""What every request passes: an id, a log line, metrics, and the gate that keeps out what is too large or foreign."""

from collections.abc import Mapping
from time import perf_counter
from uuid import uuid4

import structlog
from prometheus_client import Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.kernel.errors import PenstockError, TooLarge
from penstock.kernel.http import problems
from penstock.kernel.http.headers import LOCAL_NAMES, foreign_page, is_request_id
from penstock.kernel.http.health import LivenessPulse
from penstock.kernel.telemetry.telemetry import Telemetry

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NOSNIFF = (b"x-content-type-options", b"nosniff")


class HttpMetrics:
    """Requests by route, never by path: a path is the caller's to choose."""

    def __init__(self, telemetry: Telemetry) -> None:
        names = ["method", "route", "status"]
        self.requests = Counter("penstock_http_requests", "Requests answered", names, registry=telemetry.registry)
        self.seconds = Histogram(
            "penstock_http_request_seconds", "Time to answer", names[:2], registry=telemetry.registry
        )


class RequestObserver:
    """Gives every request an id, an answer whatever happens, a log line and its place in the metrics."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The caller's id when it is a sane one, so that logs of several services can be joined; else a new one.
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
        request_id = scope["request_id"] = given if is_request_id(given) else uuid4().hex
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
                if status:  # half an answer is out: only a broken connection can tell the caller
                    raise
                await problems.respond_to_bug(error, scope)(scope, receive, send_with_id)
            finally:
                self._note(scope, status, perf_counter() - began)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.requests.labels(method, route, status).inc()
        self._metrics.seconds.labels(method, route).observe(seconds)
        level = "debug" if route.startswith("/actuator") else "info"
        getattr(structlog.get_logger(), level)(
            "request", method=method, path=scope["path"], status=status, seconds=round(seconds, 6)
        )


class DrainState:
    """Sends clients of a process that is about to stop elsewhere: with their answer, not between two requests."""

    def __init__(self, app: ASGIApp, pulse: LivenessPulse) -> None:
        self._app = app
        self._pulse = pulse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_part(message: Message) -> None:
            if message["type"] == "http.response.start" and self._pulse.is_draining:
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, send_and_part)


class RequestLimits:
    """Refuses bodies over the limit, and, where nobody authenticates, pages of other sites."""

    def __init__(self, app: ASGIApp, body_limit: int, local_name: str | None) -> None:
        self._app = app
        self._limit = body_limit
        self._local_names = None if local_name is None else LOCAL_NAMES | {local_name}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal({name: value.decode("latin-1") for name, value in scope["headers"]})
        if refusal is None:
            refusal = await self._pass_counted(scope, receive, send)
        if refusal is not None:
            await problems.respond(refusal, scope)(scope, receive, send)

    def _refusal(self, headers: Mapping[bytes, str]) -> PenstockError | None:
        length = headers.get(b"content-length", "0")
        if length.isdigit() and int(length) > self._limit:
            return self._too_large()
        return None if self._local_names is None else foreign_page(headers, self._local_names)

    async def _pass_counted(self, scope: Scope, receive: Receive, send: Send) -> PenstockError | None:
        """Let the request through, but count its body; whatever the application makes of a cut one is not sent."""
        seen, answered = 0, False

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise self._too_large()
            return message

        async def send_unless_over(message: Message) -> None:
            nonlocal answered
            if seen <= self._limit or answered:
                answered = True
                await send(message)

        try:
            await self._app(scope, counted, send_unless_over)
        except TooLarge:
            if answered:
                raise
        return self._too_large() if seen > self._limit and not answered else None

    def _too_large(self) -> TooLarge:
        return TooLarge("BODY_TOO_LARGE", f"a body has at most {self._limit} bytes here", hint="send it in parts")
