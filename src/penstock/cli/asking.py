"""How commands ask a running server."""

import os
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from penstock.kernel.api_client import ApiClient

C = TypeVar("C", bound="ApiClient")
T = TypeVar("T")
URL = "http://127.0.0.1:8080"
UrlOption = Annotated[
    str, typer.Option("--url", envvar="PENSTOCK_URL", help="The server; a token is taken from PENSTOCK_TOKEN.")
]


def ask(client_of: Callable[[str | None], C], question: Callable[[C], Awaitable[T]]) -> T:
    """What the server answers to *question*."""
    import asyncio

    async def asking() -> T:
        async with client_of(os.environ.get("PENSTOCK_TOKEN")) as client:
            return await question(client)

    return asyncio.run(asking())


def moment(text: str) -> str:
    """A server's time for people."""
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S}"
