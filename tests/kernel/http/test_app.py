"""The HTTP application around every route: problems, ids, limits, strangers, metrics."""

from collections.abc import AsyncIterator

import httpx
import jwt
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel

from penstock.kernel.errors import Conflict, Corrupt, NotFound, PenstockError, Transient
from penstock.kernel.http.app import Caller, create_app
from penstock.kernel.http.auth import JwtAuthenticator
from penstock.kernel.http.keys import SharedSecret
from penstock.kernel.http.middleware import HttpMetrics
from penstock.kernel.telemetry.telemetry import Telemetry

SECRET = "a secret of thirty-two bytes or more"
KNOWN = {error.__name__: error for error in (Conflict, NotFound, Transient, Corrupt)}


class Item(BaseModel):
    name: str
    count: int


def make_app(telemetry: Telemetry) -> FastAPI:
    authenticator = JwtAuthenticator(SharedSecret(SECRET), algorithms=["HS256"])
    app = create_app("test", telemetry, HttpMetrics(telemetry), authenticator, body_limit=1000, local_name="127.0.0.2")

    @app.get("/fail/{name}")
    async def fail(name: str) -> None:
        raise KNOWN[name]("SOME_CODE", "a sentence", hint="the next step", current="started")

    @app.get("/bug")
    async def bug() -> None:
        raise ZeroDivisionError("secret internals")

    @app.post("/items")
    async def items(item: Item) -> Item:
        return item

    @app.post("/raw")
    async def raw(request: Request) -> int:
        return len(await request.body())

    @app.get("/tenants/{tenant}")
    async def tenant(tenant: str, who: Caller) -> str:
        who.must_act_for(tenant)
        return tenant

    return app


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


@pytest.fixture
async def http(telemetry: Telemetry) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_app(telemetry), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.mark.parametrize("error", KNOWN.values())
async def test_a_known_error_is_a_problem_with_code_and_hint(
    http: httpx.AsyncClient, error: type[PenstockError]
) -> None:
    """T9: RFC 9457 problem+json with a stable code, the current state and a hint."""
    answer = await http.get(f"/fail/{error.__name__}")
    assert answer.status_code == error.status
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert (body["code"], body["detail"], body["hint"]) == ("SOME_CODE", "a sentence", "the next step")
    assert (body["current"], body["status"], body["type"]) == (
        "started",
        error.status,
        "urn:penstock:problem:some-code",
    )
    assert body["request_id"] == answer.headers["x-request-id"]


async def test_a_bug_is_a_500_that_tells_nothing(http: httpx.AsyncClient) -> None:
    """An unexpected error gives its request id, never its internals."""
    answer = await http.get("/bug")
    assert answer.status_code == 500
    assert answer.json()["code"] == "INTERNAL"
    assert "secret" not in answer.text
    assert "x-request-id" in answer.headers


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("GET", "/nowhere", b"", 404, "NOT_FOUND"),
        ("DELETE", "/items", b"", 405, "METHOD_NOT_ALLOWED"),
        ("POST", "/items", b"{", 422, "MALFORMED"),
        ("POST", "/items", b'{"name": "a"}', 422, "MALFORMED"),
        ("POST", "/items", b'{"name": "a", "count": "x"}', 422, "MALFORMED"),
        ("POST", "/items", b"[" * 500, 422, "MALFORMED"),
        ("POST", "/items", b"\xff\xfe", 422, "MALFORMED"),
        ("POST", "/raw", b"x" * 1001, 413, "BODY_TOO_LARGE"),
    ],
)
async def test_bad_requests_are_problems(
    http: httpx.AsyncClient, method: str, path: str, content: bytes, status: int, code: str
) -> None:
    """T9: malformed, unknown and oversized requests are told what is wrong, as problems."""
    answer = await http.request(method, path, content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("path", ["/raw", "/items"])
async def test_a_body_without_a_length_is_counted(http: httpx.AsyncClient, path: str) -> None:
    """R8: a chunked body is cut off at the limit, however it is read."""

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    answer = await http.post(path, content=chunks(), headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (413, "BODY_TOO_LARGE")


async def test_a_body_at_the_limit_passes(http: httpx.AsyncClient) -> None:
    """The limit itself is allowed."""
    assert (await http.post("/raw", content=b"x" * 1000)).json() == 1000


async def test_a_sane_request_id_is_kept_and_a_strange_one_replaced(http: httpx.AsyncClient) -> None:
    """A caller's id joins its logs with ours; one that could forge a log line does not get in."""
    assert (await http.get("/nowhere", headers={"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
    assert (await http.get("/nowhere", headers={"x-request-id": 'a"b c'})).headers["x-request-id"] != 'a"b c'


async def test_without_authentication_strangers_are_refused(http: httpx.AsyncClient) -> None:
    """R25: on loopback without auth, names that are not local and pages of other sites get 403."""
    assert (await http.get("/nowhere", headers={"host": "evil.example"})).json()["code"] == "FOREIGN_HOST"
    assert (await http.get("/nowhere", headers={"sec-fetch-site": "cross-site"})).json()["code"] == "FOREIGN_PAGE"
    for host in ("localhost:8080", "127.0.0.1", "[::1]:9", "127.0.0.2:80"):
        assert (await http.get("/nowhere", headers={"host": host})).status_code == 404


async def test_a_token_opens_its_own_tenant_only(http: httpx.AsyncClient) -> None:
    """R25: no token 401, a bad one 401, another tenant's 403, one's own 200."""
    token = jwt.encode({"tenant_id": "a", "sub": "ann", "exp": 4_000_000_000}, SECRET, algorithm="HS256")
    mine = {"authorization": f"Bearer {token}"}
    missing, bad = await http.get("/tenants/a"), await http.get("/tenants/a", headers={"authorization": "Bearer x"})
    assert (missing.status_code, missing.headers["www-authenticate"]) == (401, "Bearer")
    assert bad.status_code == 401
    assert (await http.get("/tenants/b", headers=mine)).status_code == 403
    assert (await http.get("/tenants/a", headers=mine)).status_code == 200


async def test_metrics_are_by_route_not_by_path(http: httpx.AsyncClient, telemetry: Telemetry) -> None:
    """R26: a caller cannot fill the metrics with paths or methods of its own."""
    for number in range(5):
        await http.get(f"/nowhere/{number}")
        await http.request(f"METHOD{number}", "/items")
    text = telemetry.exposition().decode()
    assert 'method="GET",route="none",status="404"} 5.0' in text
    assert "METHOD1" not in text


async def test_the_page_of_the_api_needs_no_internet(http: httpx.AsyncClient) -> None:
    """OpenAPI is there, and its page loads scripts from this server alone."""
    assert (await http.get("/openapi.json")).json()["openapi"].startswith("3.1")
    page = (await http.get("/docs")).text
    assert "https://" not in page
    for name in ("swagger-ui-bundle.js", "swagger-ui.css"):
        assert (await http.get(f"/swagger/{name}")).status_code == 200
