"""Error responses: problems with a code and a hint, without internal details."""

import httpx
import pytest

from penstock.kernel.errors import PenstockError
from tests.kernel.http.routes_app import KNOWN


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


async def test_a_bug_is_a_500_without_details(http: httpx.AsyncClient) -> None:
    """The response to an unexpected error has the request id, and no internal details."""
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
    """T9: the responses to malformed, unknown and oversized requests are problems."""
    answer = await http.request(method, path, content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/problem+json"


async def test_a_wrong_body_is_described_in_plain_words(http: httpx.AsyncClient) -> None:
    """Validation: a 422 names every wrong field and what it must be, without a message of the library."""
    answer = await http.post("/items", json={"count": "x"})
    assert answer.json()["errors"] == [
        {"at": "body.name", "message": "is required"},
        {"at": "body.count", "message": "must be a whole number"},
    ]
    broken = await http.post("/items", content=b"{", headers={"content-type": "application/json"})
    assert broken.json()["detail"].startswith("body: is not valid JSON: ")
