"""RFC 9457: an error as a body of problem+json; without FastAPI, which the query processes do not load."""

from collections.abc import Mapping
from typing import Any

from penstock.kernel.errors import PenstockError

MEDIA_TYPE = "application/problem+json"
EXTRA_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}


def as_problem(error: PenstockError, request_id: str | None) -> dict[str, Any]:
    """Return *error* as the body of a response."""
    return make_problem(error.status, error.title, error.as_dict(), request_id)


def make_problem(status: int, title: str, body: Mapping[str, Any], request_id: str | None) -> dict[str, Any]:
    """Return the body of a response with this *status*; *body* contains at least `code` and `detail`."""
    kind = f"urn:penstock:problem:{body['code'].lower().replace('_', '-')}"
    return {"type": kind, "title": title, "status": status, **body, "request_id": request_id}
