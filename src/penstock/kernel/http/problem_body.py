"""RFC 9457: a failure as a body of problem+json; without FastAPI, which the processes of a pod do not load."""

from collections.abc import Mapping
from typing import Any

from penstock.kernel.errors import PenstockError

MEDIA_TYPE = "application/problem+json"
EXTRA_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}


def as_problem(error: PenstockError, request_id: str | None) -> dict[str, Any]:
    """*error* as the body of a response."""
    return problem(error.status, error.title, error.as_dict(), request_id)


def problem(status: int, title: str, body: Mapping[str, Any], request_id: str | None) -> dict[str, Any]:
    """The body of a response with this *status*; *body* has at least a code and what is said."""
    kind = f"urn:penstock:problem:{body['code'].lower().replace('_', '-')}"
    return {"type": kind, "title": title, "status": status, **body, "request_id": request_id}
