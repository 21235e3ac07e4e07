"""RFC 9457: every failure of a FastAPI application, as problem+json with a stable code and a hint."""

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
from penstock.kernel.http.problem_body import EXTRA_HEADERS, MEDIA_TYPE, problem

# Starlette's own words for these are but the status again.
_PLAINER = {404: "nothing is at {request.url.path}", 405: "{request.url.path} does not take {request.method}"}
_TOLD = 20  # mistakes of one body: who sends thousands need not read them all
_SHOWN = "/docs shows what there is"


class Problem(BaseModel):
    """What went wrong, under a stable code, and what to do next."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    code: str
    detail: str
    hint: str | None = None
    request_id: str | None = None


RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {"description": "What went wrong", "content": {MEDIA_TYPE: {"schema": Problem.model_json_schema()}}}
}


def install(app: FastAPI) -> None:
    """Answer every failure *app* knows with a problem; `RequestObserver` answers the others."""
    app.add_exception_handler(PenstockError, _on_known)
    app.add_exception_handler(RequestValidationError, _on_malformed)
    app.add_exception_handler(HTTPException, _on_http)


def respond(error: PenstockError, scope: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer for *error* to the request of *scope*."""
    return _respond(error.status, error.title, error.as_dict(), scope, headers)


def respond_to_bug(error: Exception, scope: Mapping[str, Any]) -> JSONResponse:
    """The answer when something unexpected was raised: the caller gets an id, the log gets the rest."""
    structlog.get_logger().error("request_crashed", exc_info=error)
    detail = "something went wrong here; the log has it under the request id"
    return _plain(500, "INTERNAL", detail, scope)


async def _on_known(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PenstockError)  # noqa: S101 - registered for this type
    return respond(error, request.scope)


async def _on_malformed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for this type
    found = error.errors()[:_TOLD]
    errors = [{"at": ".".join(map(str, detail["loc"])), "message": detail["msg"]} for detail in found]
    detail = "; ".join(f"{one['at']}: {one['message']}" for one in errors)
    return _plain(422, "MALFORMED", detail, request.scope, hint=_SHOWN, errors=errors)


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for this type
    code = HTTPStatus(error.status_code).phrase.upper().replace(" ", "_")
    told = _PLAINER.get(error.status_code)
    if error.status_code == 400 and error.__cause__ is not None:  # the framework's word for a body it cannot read
        return _plain(422, "MALFORMED", f"body: {error.__cause__}", request.scope, hint=_SHOWN)
    more = {"detail": told.format(request=request), "hint": _SHOWN} if told else {}
    response = _plain(error.status_code, code, str(error.detail), request.scope, **more)
    response.headers.update(error.headers or {})
    return response


def _plain(status: int, code: str, said: str, scope: Mapping[str, Any], **more: Any) -> JSONResponse:
    return _respond(status, HTTPStatus(status).phrase, {"code": code, "detail": said} | more, scope)


def _respond(
    status: int, title: str, body: Mapping[str, Any], scope: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> JSONResponse:
    content = problem(status, title, body, scope.get("request_id"))
    return JSONResponse(content, status, {**EXTRA_HEADERS.get(status, {}), **(headers or {})}, media_type=MEDIA_TYPE)
