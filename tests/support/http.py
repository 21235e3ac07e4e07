"""Assertions on HTTP responses of the product's APIs."""

import httpx

from tests.support.types import Json

PROBLEM = "application/problem+json"


def answered(answer: httpx.Response, status: int = 200) -> Json:
    """Return the JSON body of a response with the expected *status*."""
    assert answer.status_code == status, answer.text
    document: Json = answer.json()
    return document


def problem(answer: httpx.Response, status: int, code: str) -> Json:
    """Return the body of an error response: an RFC 9457 problem with *status*, a stable *code* and a hint."""
    body: Json = answer.json()
    assert (answer.status_code, body.get("code")) == (status, code), answer.text
    assert answer.headers["content-type"] == PROBLEM
    assert (body["status"], body["type"]) == (status, f"urn:penstock:problem:{code.lower().replace('_', '-')}")
    assert body["title"]
    assert body["detail"]
    assert body["hint"]
    return body
