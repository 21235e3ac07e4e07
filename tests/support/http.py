"""Requests to the product's APIs and assertions on their responses."""

from collections.abc import Mapping

import httpx

from tests.support.types import Json
from tests.support.wait import until

PROBLEM = "application/problem+json"


def answered(answer: httpx.Response, status: int = 200) -> Json:
    """Return the JSON body of a response with the expected *status*."""
    assert answer.status_code == status, answer.text
    document: Json = answer.json()
    return document


def commit_update(updates: str, body: Json, headers: Mapping[str, str] | None = None) -> httpx.Response:
    """Send an update to the URL *updates* and return the response once the update is no longer pending.

    WAIT_COMMIT waits for one second at most, which a busy machine may exceed.
    """
    params = {"consistencyMode": "WAIT_COMMIT", "timeoutMs": "1000"}
    with httpx.Client(timeout=30, headers=headers) as client:
        answers = [client.post(updates, params=params, json=body)]

        def is_settled() -> bool:
            if answers[-1].status_code == 202 or answers[-1].json().get("status") == "PENDING":
                answers.append(client.get(f"{updates}/{answers[-1].json()['eventId']}"))
                return False
            return True

        until(is_settled, "the update is no longer pending")
    return answers[-1]


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
