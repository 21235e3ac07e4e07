"""F14: steps that send one HTTP request, on a real server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from penstock.flows.config import HttpSection
from penstock.flows.contract import DOCUMENT_LIMIT
from penstock.flows.kinds import http as kind
from penstock.flows.kinds.http import open_http_handler
from penstock.flows.kinds.registry import check_inputs
from penstock.flows.step import Handler, StepFailed
from penstock.kernel.errors import Invalid
from tests.flows.memory_step_io import MemoryStepIO, make_step, run_failing_step, run_step
from tests.support.types import Json

SECRET = 'Bearer s3"cret-ß-long'


class RecordingServer:
    """A server with scripted responses that records its requests."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[web.Request] = []
        self.bodies: list[str] = []
        self.answer: Callable[[], web.Response] = web.Response
        self.holds: asyncio.Event | None = None

    async def handle(self, request: web.Request) -> web.Response:
        self.requests.append(request)
        self.bodies.append(await request.text())
        if self.holds is not None:
            await self.holds.wait()
        return self.answer()


@pytest.fixture
async def server() -> AsyncIterator[RecordingServer]:
    recorder = RecordingServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", recorder.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    recorder.url = site.name + "/v1"
    yield recorder
    await runner.cleanup()


@asynccontextmanager
async def worker_to(*allow: str, **secrets: str) -> AsyncIterator[Handler]:
    entries = {name: {"value": value, "to": allow[:1]} for name, value in secrets.items()}
    section = HttpSection.model_validate({"allow": allow, "secrets": entries})
    async with open_http_handler(section) as handler:
        yield handler


async def send(server: RecordingServer, step_io: MemoryStepIO | None = None, **inputs: Any) -> Json:
    """Send a request that must succeed, and return the outputs."""
    async with worker_to(server.url) as worker:
        return await run_step(worker, make_step("http", {"url": f"{server.url}/items", **inputs}, step_io=step_io))


async def send_failing(server: RecordingServer, **inputs: Any) -> StepFailed:
    async with worker_to(server.url) as worker:
        return await run_failing_step(worker, make_step("http", {"url": f"{server.url}/items", **inputs}))


async def test_request_is_sent_as_written(server: RecordingServer) -> None:
    """F14: method, parameters, headers and body, with the same idempotency key at every attempt."""
    inputs = {"method": "POST", "params": {"q": "a b", "n": [1, True]}, "headers": {"X-One": "1"}, "json": {"a": None}}
    async with worker_to(server.url) as worker:
        for attempt in (1, 2):
            await run_step(worker, make_step("http", {"url": f"{server.url}/items?x=y", **inputs}, attempt=attempt))
    first, second = server.requests
    assert (first.method, first.path_qs) == ("POST", "/v1/items?x=y&q=a+b&n=1&n=true")
    assert (first.headers["X-One"], first.headers["Content-Type"]) == ("1", "application/json")
    assert first.headers["Idempotency-Key"] == second.headers["Idempotency-Key"] == "run-1/step-1"
    assert server.bodies == ['{"a":null}'] * 2
    await send(server, method="PUT", body="plain", headers={"content-type": "text/csv"})
    assert (server.bodies[-1], server.requests[-1].headers["Content-Type"]) == ("plain", "text/csv")


async def test_response_is_the_outputs(server: RecordingServer) -> None:
    """F14: status, some headers, and the body as JSON or as text."""
    server.answer = lambda: web.json_response({"a": [1]}, headers={"ETag": "x", "X-Other": "y", "Set-Cookie": "c=1"})
    outputs = await send(server)
    assert outputs == {
        "status": 200,
        "headers": {"Content-Type": "application/json; charset=utf-8", "ETag": "x"},
        "json": {"a": [1]},
    }
    server.answer = lambda: web.Response(text="hé")
    assert (await send(server))["text"] == "hé"
    server.answer = lambda: web.Response(text="{oops", content_type="application/json")
    assert (await send(server))["text"] == "{oops"
    server.answer = lambda: web.Response(status=204)
    assert await send(server) == {"status": 204, "headers": {}}
    assert "cookie" not in {name.lower() for request in server.requests for name in request.headers}


@pytest.mark.parametrize("body", [b"x" * (DOCUMENT_LIMIT + 1), b"\xff\x00", b"a\0b", b'"' * (DOCUMENT_LIMIT // 2)])
async def test_large_and_binary_bodies_become_an_artifact(server: RecordingServer, body: bytes) -> None:
    """F14: a body that is too large, or not text, is stored unchanged as `body`."""
    step_io = MemoryStepIO()
    server.answer = lambda: web.Response(body=body, content_type="text/plain")
    outputs = await send(server, step_io)
    assert (outputs["artifact"], outputs["bytes"]) == ("runs/run-1/step-1/body", len(body))
    assert step_io.written == {"body": body}


async def test_unlimited_response_is_refused(server: RecordingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """F14: a response above the limit does not fill the memory."""
    monkeypatch.setattr(kind, "BODY_LIMIT", 1_000)
    server.answer = lambda: web.Response(body=b"x" * 1_001)
    error = await send_failing(server)
    assert (error.error.code, error.retryable) == ("HTTP_TOO_LARGE", False)


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_server_errors_are_retryable(server: RecordingServer, status: int) -> None:
    """F10, F14: 429 and 5xx are retryable, with their own code."""
    server.answer = lambda: web.Response(status=status, text="busy", headers={"Retry-After": "7"})
    error = await send_failing(server)
    assert (error.error.code, error.retryable) == ("HTTP_UNAVAILABLE", True)
    assert error.error.details["status"] == status
    assert (error.error.details["body"], error.error.details["headers"]["Retry-After"]) == ("busy", "7")


@pytest.mark.parametrize("status", [304, 400, 404, 409])
async def test_client_errors_are_final(server: RecordingServer, status: int) -> None:
    """F10, F14: other statuses are not retryable, unless the flow lists them."""
    server.answer = lambda: web.Response(status=status)
    error = await send_failing(server)
    assert (error.error.code, error.retryable) == ("HTTP_STATUS", False)
    assert (await send_failing(server, retryOn=[status])).retryable is True
    assert (await send(server, expect=[status]))["status"] == status
    server.answer = lambda: web.Response(status=200)
    assert (await send_failing(server, expect=[status])).error.code == "HTTP_STATUS"


async def test_timeouts_and_closed_ports_are_retryable(server: RecordingServer) -> None:
    """F10, F14: a missing response and a closed port are retryable."""
    server.holds = asyncio.Event()
    error = await send_failing(server, timeoutSeconds=0.05)
    assert (error.error.code, error.retryable) == ("HTTP_TIMEOUT", True)
    server.holds.set()
    closed = "http://127.0.0.1:9/"  # discard: no server listens
    async with worker_to(closed) as worker:
        error = await run_failing_step(worker, make_step("http", {"url": f"{closed}x?token=t0p"}))
    assert (error.error.code, error.retryable) == ("HTTP_UNAVAILABLE", True)
    assert "t0p" not in str(error.error)


@pytest.mark.parametrize(
    "url",
    [
        "{root}/v2/items",
        "{root}/v1evil",
        "{root}/v1/../v2",
        "{root}/v1/%2e%2e/v2",
        "{root}/v1/%252e%252e/v2",
        "{root}/v1/..%2fv2",
        "{root}/v1/..%5cv2",
        "{root}/v1/..;/v2",
        "{root}/V1/items",
        "http://user@{host}/v1/items",
        "http://:pass@{host}/v1/items",
        "http://{host}@example.com/v1/items",
        "http://127.0.0.1.example.com/v1/items",
        "http://127.0.0.1:1/v1/items",
        "https://{host}/v1/items",
        "http://example.com/{root}/v1/items",
        "http://example.com#@{host}/v1/items",
        "ftp://{host}/v1/items",
        "//{host}/v1/items",
        "/v1/items",
        "file:///etc/passwd",
    ],
)
async def test_other_urls_are_refused(server: RecordingServer, url: str) -> None:
    """F14: only URLs below an entry of `flows.http.allow` are allowed; the error names the setting."""
    root = server.url.removesuffix("/v1")
    meant = url.format(root=root, host=root.removeprefix("http://"))
    async with worker_to(server.url) as worker:
        error = await run_failing_step(worker, make_step("http", {"url": meant}))
    assert (error.error.code, error.retryable) == ("HTTP_NOT_ALLOWED", False)
    assert "flows.http.allow" in error.error.message
    assert "pass" not in error.error.message.replace("passwd", "")
    assert server.requests == []


async def test_no_url_is_allowed_by_default(server: RecordingServer) -> None:
    """F14: without the setting no request is sent."""
    async with worker_to() as worker:
        error = await run_failing_step(worker, make_step("http", {"url": server.url}))
    assert error.error.code == "HTTP_NOT_ALLOWED"


async def test_allowed_urls(server: RecordingServer) -> None:
    """F14: the URL of an entry and all URLs below it, with or without a slash at its end."""
    for allow, path in (("", ""), ("", "/"), ("", "/a"), ("/", "/a/b%20c"), ("/a", "/a?x=../..")):
        async with worker_to("https://example.com/", server.url + allow) as worker:
            await run_step(worker, make_step("http", {"url": server.url + path}))
    assert len(server.requests) == 5


async def test_redirects_are_not_followed(server: RecordingServer) -> None:
    """F14: a redirect could lead to a URL that is not allowed, with the secrets; its location is an output."""
    server.answer = lambda: web.Response(status=302, headers={"Location": "http://169.254.169.254/latest"})
    error = await send_failing(server)
    assert (error.error.code, len(server.requests)) == ("HTTP_STATUS", 1)
    outputs = await send(server, expect=[302])
    assert outputs["headers"]["Location"] == "http://169.254.169.254/latest"


async def test_secrets_are_masked(server: RecordingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """F14: the value of a secret header is in no output, error or log, even if the server repeats it."""
    monkeypatch.setenv("FLOW_TOKEN", SECRET)
    step_io = MemoryStepIO()
    inputs = {"url": server.url, "secretHeaders": {"Authorization": "token"}}
    async with worker_to(server.url, token="env:FLOW_TOKEN") as worker:
        server.answer = lambda: web.json_response({"you": SECRET, "are": [SECRET.split()[1]]})
        outputs = await run_step(worker, make_step("http", inputs, step_io=step_io))
        assert outputs["json"] == {"you": "***", "are": ["***"]}
        server.answer = lambda: web.Response(status=400, text=f"bad {SECRET}", headers={"Link": SECRET})
        error = await run_failing_step(worker, make_step("http", inputs, step_io=step_io))
        server.answer = lambda: web.Response(body=b"\xff" + SECRET.encode())
        await run_step(worker, make_step("http", inputs, step_io=step_io))
    assert server.requests[0].headers["Authorization"] == SECRET
    assert "***" in error.error.details["body"]
    for output in (outputs, error.error, step_io.logs, step_io.written):
        assert "s3" not in str(output)


async def test_secrets_are_sent_only_to_their_urls(server: RecordingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """F14: a URL may be allowed, but not for every secret."""
    monkeypatch.setenv("FLOW_TOKEN", SECRET)
    inputs = {"secretHeaders": {"Authorization": "token"}}
    async with worker_to(f"{server.url}/own", server.url, token="env:FLOW_TOKEN") as worker:
        for other in ("", "/own2", "/own/../other"):
            error = await run_failing_step(worker, make_step("http", {**inputs, "url": server.url + other}))
            assert error.error.code in ("SECRET_NOT_ALLOWED", "HTTP_NOT_ALLOWED")
        assert server.requests == []
        await run_step(worker, make_step("http", {**inputs, "url": f"{server.url}/own/place"}))
    assert server.requests[0].headers["Authorization"] == SECRET


async def test_missing_secrets_are_named(server: RecordingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """F14: an unset name, a missing reference and an invalid header value are errors without the value."""
    inputs = {"url": server.url, "secretHeaders": {"Authorization": "token"}}
    async with worker_to(server.url) as worker:
        assert (await run_failing_step(worker, make_step("http", inputs))).error.code == "SECRET_UNKNOWN"
    async with worker_to(server.url, token="env:FLOW_TOKEN") as worker:
        assert (await run_failing_step(worker, make_step("http", inputs))).error.code == "SECRET_MISSING"
        monkeypatch.setenv("FLOW_TOKEN", "two\r\nlines")
        error = await run_failing_step(worker, make_step("http", inputs))
    assert error.error.code == "BAD_INPUTS"
    assert "lines" not in str(error.error)
    assert server.requests == []


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"url": ""}, "inputs.url"),
        ({"method": "TRACE"}, "inputs.method"),
        ({"headers": {"A b": "c"}}, "inputs.headers"),
        ({"headers": {"A": "b\r\nC: d"}}, "inputs.headers"),
        ({"headers": {"host": "other"}}, "headers"),
        ({"json": None, "body": ""}, "`json` or `body`"),
        ({"expect": [99]}, "inputs.expect.0"),
        ({"timeoutSeconds": 0}, "inputs.timeoutSeconds"),
        ({"proxy": "x"}, "inputs.proxy"),
    ],
)
async def test_inputs_are_checked_before_a_run(server: RecordingServer, wrong: Json, field: str) -> None:
    """F2, F14: errors are reported with the field when the run is created; a reference is not an error."""
    inputs = {"url": "${scope.url}", "timeoutSeconds": "${scope.wait}", "json": "${steps.a.outputs}"}
    check_inputs["http"](inputs)
    with pytest.raises(Invalid, match=field) as caught:
        check_inputs["http"]({"url": server.url, **wrong})
    assert caught.value.code == "BAD_INPUTS"
    async with worker_to(server.url) as worker:
        assert (
            await run_failing_step(worker, make_step("http", {"url": server.url, **wrong}))
        ).error.code == "BAD_INPUTS"
