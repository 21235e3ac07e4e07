"""An application with a few routes, for tests of what is around every route."""

from fastapi import FastAPI, Request
from pydantic import BaseModel

from penstock.kernel.errors import Conflict, Corrupt, NotFound, Transient
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
        who.require_tenant(tenant)
        return tenant

    return app
