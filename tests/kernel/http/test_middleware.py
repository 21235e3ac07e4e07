"""Middleware of every request: limits of bodies, request ids, foreign origins, log levels, metrics."""

from collections.abc import AsyncIterator

import httpx
import pytest
from structlog.testing import capture_logs

from penstock.kernel.telemetry.telemetry import Telemetry


@pytest.mark.parametrize("path", ["/raw", "/items"])
async def test_a_body_without_a_length_is_counted(http: httpx.AsyncClient, path: str) -> None:
    """R8: a chunked body is refused at the limit, however it is read."""

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    answer = await http.post(path, content=chunks(), headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (413, "BODY_TOO_LARGE")


async def test_a_body_at_the_limit_passes(http: httpx.AsyncClient) -> None:
    """The limit itself is allowed."""
    assert (await http.post("/raw", content=b"x" * 1000)).json() == 1000


async def test_a_valid_request_id_is_used_and_an_invalid_one_replaced(http: httpx.AsyncClient) -> None:
    """The id of a caller joins its logs with those of the server; an id that could forge a log line is replaced."""
    assert (await http.get("/nowhere", headers={"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
    assert (await http.get("/nowhere", headers={"x-request-id": 'a"b c'})).headers["x-request-id"] != 'a"b c'


async def test_without_authentication_other_hosts_and_sites_are_refused(http: httpx.AsyncClient) -> None:
    """R25: on loopback without auth, names that are not local and pages of other sites get 403."""
    assert (await http.get("/nowhere", headers={"host": "evil.example"})).json()["code"] == "HOST_NOT_ALLOWED"
    assert (await http.get("/nowhere", headers={"sec-fetch-site": "cross-site"})).json()[
        "code"
    ] == "CROSS_ORIGIN_REQUEST"
    for host in ("localhost:8080", "127.0.0.1", "[::1]:9", "127.0.0.2:80"):
        assert (await http.get("/nowhere", headers={"host": host})).status_code == 404


async def test_metrics_are_by_route_not_by_path(http: httpx.AsyncClient, telemetry: Telemetry) -> None:
    """R26: a caller cannot fill the metrics with paths or methods of its own."""
    for number in range(5):
        await http.get(f"/nowhere/{number}")
        await http.request(f"METHOD{number}", "/items")
    text = telemetry.format_metrics().decode()
    assert 'method="GET",route="none",status="404"} 5.0' in text
    assert "METHOD1" not in text


@pytest.mark.parametrize(
    ("method", "path", "status", "level"),
    [("GET", "/docs", 200, "debug"), ("GET", "/nowhere", 404, "info"), ("GET", "/bug", 500, "warning")],
)
async def test_log_level_follows_the_status(
    http: httpx.AsyncClient, method: str, path: str, status: int, level: str
) -> None:
    """Log of `penstock up`: success is logged at DEBUG, a client error at INFO, a server error at WARNING."""
    with capture_logs() as logs:
        assert (await http.request(method, path)).status_code == status
    assert [log["log_level"] for log in logs if log["event"] == "request_answered"] == [level]
