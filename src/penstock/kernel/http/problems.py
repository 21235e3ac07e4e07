"""RFC 9457: every error of a FastAPI application as problem+json, with a stable code and a hint."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from penstock.kernel.errors import PenstockError
from penstock.kernel.http.problem_body import EXTRA_HEADERS, MEDIA_TYPE, make_problem
from penstock.kernel.validation import list_violations

# The messages of Starlette for these repeat the status.
_MESSAGES = {404: "there is no route {request.url.path}", 405: "{request.url.path} has no method {request.method}"}
_ERROR_LIMIT = 20  # errors of one request that are listed; a body can have thousands
_HINT = "/docs describes the routes of this server, their parameters and bodies"


class Problem(BaseModel):
    """An error of a request: a stable code, what happened, and what to do next."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    code: str
    detail: str
    hint: str | None = None
    request_id: str | None = None


RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {"description": "An error", "content": {MEDIA_TYPE: {"schema": Problem.model_json_schema()}}}
}


def install(app: FastAPI) -> None:
    """Answer every expected error of *app* with a problem; `RequestObserver` answers the others."""
    app.add_exception_handler(PenstockError, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_malformed)
    app.add_exception_handler(HTTPException, _answer_http_error)


def respond(error: PenstockError, scope: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the response for *error* to the request of *scope*."""
    return _respond(error.status, error.title, error.as_dict(), scope, headers)


def respond_to_bug(error: Exception, scope: Mapping[str, Any]) -> JSONResponse:
    """Log an unexpected *error* and return the response for it, which names the request but no detail."""
    structlog.get_logger().error("request_crashed", exc_info=error)
    hint = "search the log of the server for this request_id, and report the traceback as a bug"
    return _respond_plainly(500, "INTERNAL", "an unexpected error occurred in the server", scope, hint=hint)


async def _answer_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PenstockError)  # noqa: S101 - registered for this type
    return respond(error, request.scope)


async def _answer_malformed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for this type
    violations = list_violations(error.errors()[:_ERROR_LIMIT], {"body": error.body})
    errors = [{"at": ".".join(map(str, item.path)), "message": item.message} for item in violations]
    detail = "; ".join(f"{item['at']}: {item['message']}" for item in errors)
    return _respond_plainly(422, "MALFORMED", detail, request.scope, hint=_HINT, errors=errors)


async def _answer_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for this type
    code = HTTPStatus(error.status_code).phrase.upper().replace(" ", "_")
    message = _MESSAGES.get(error.status_code)
    if error.status_code == 400 and error.__cause__ is not None:  # what the framework raises for an unreadable body
        detail = f"the body of the request cannot be read: {error.__cause__}"
        return _respond_plainly(422, "MALFORMED", detail, request.scope, hint=_HINT)
    more = {"detail": message.format(request=request), "hint": _HINT} if message else {}
    response = _respond_plainly(error.status_code, code, str(error.detail), request.scope, **more)
    response.headers.update(error.headers or {})
    return response


def _respond_plainly(status: int, code: str, text: str, scope: Mapping[str, Any], **more: Any) -> JSONResponse:
    return _respond(status, HTTPStatus(status).phrase, {"code": code, "detail": text} | more, scope)


def _respond(
    status: int, title: str, body: Mapping[str, Any], scope: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> JSONResponse:
    content = make_problem(status, title, body, scope.get("request_id"))
    return JSONResponse(content, status, {**EXTRA_HEADERS.get(status, {}), **(headers or {})}, media_type=MEDIA_TYPE)
