"""An HTTP application without routes, with everything around them."""

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Annotated, TypeVar, cast

from fastapi import Depends, FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

from penstock import __version__
from penstock.kernel.errors import Forbidden
from penstock.kernel.http import problems
from penstock.kernel.http.auth import Authenticator, Principal
from penstock.kernel.http.middleware import HttpMetrics, RequestLimits, RequestObserver
from penstock.kernel.telemetry.telemetry import Telemetry

T = TypeVar("T")


class ServiceRegistry:
    """The objects that the routes of an application call, each found by its class."""

    def __init__(self) -> None:
        self._by_class: dict[type, object] = {}

    def add(self, kind: type[T], service: T) -> None:
        """Register *service* as the object of class *kind*."""
        self._by_class[kind] = service

    def get(self, kind: type[T]) -> T:
        """Return the object of class *kind*; KeyError if the application was created without it."""
        return cast("T", self._by_class[kind])


def get_services(app: FastAPI) -> ServiceRegistry:
    """Return the services of *app*."""
    return cast("ServiceRegistry", app.state.services)


def get_service(request: Request, kind: type[T]) -> T:
    """Return the object of class *kind* of the application that serves *request*."""
    return get_services(request.app).get(kind)


async def _authenticate(request: Request) -> Principal:
    authenticator: Authenticator = request.app.state.authenticator
    return await authenticator.authenticate(request.headers.get("authorization"))


Caller = Annotated[Principal, Depends(_authenticate)]  # the caller of a route, or 401 without a valid token


def require_operator(subject: str) -> Callable[[Principal], Awaitable[Principal]]:
    """Return a dependency that answers 403 unless the token is an operator token; *subject* names what is protected."""

    async def check_operator(caller: Caller) -> Principal:
        if caller.tenant is not None:
            problem = f"{subject} need an operator token; this token acts for tenant {caller.tenant!r}"
            raise Forbidden("OPERATOR_ONLY", problem, hint="use a token without a tenant")
        return caller

    return check_operator


def create_app(
    title: str,
    telemetry: Telemetry,
    metrics: HttpMetrics,
    authenticator: Authenticator,
    *,
    body_limit: int,
    local_name: str | None,
) -> FastAPI:
    """Return an application with error responses, request ids, limits, metrics and the page /docs.

    With a *local_name* callers are not authenticated, and only requests to a local host name are accepted.
    """
    app = FastAPI(
        title=title,
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses=problems.RESPONSES,
        telemetry={"tracer_provider": telemetry.provider, "metrics": False, "logs": False},
    )
    app.state.authenticator = authenticator
    app.state.services = ServiceRegistry()
    problems.install(app)
    app.add_middleware(RequestLimits, body_limit=body_limit, local_name=local_name)
    app.add_middleware(RequestObserver, metrics=metrics)
    _add_page(app)
    return app


def _add_page(app: FastAPI) -> None:
    """Add the page that shows the API, from local files, so that it works without the internet."""
    app.mount("/swagger", StaticFiles(directory=str(files("fastapi_swagger").joinpath("resources"))), name="swagger")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title=app.title,
            swagger_js_url="/swagger/swagger-ui-bundle.js",
            swagger_css_url="/swagger/swagger-ui.css",
            swagger_favicon_url="/swagger/favicon-32x32.png",
        )
