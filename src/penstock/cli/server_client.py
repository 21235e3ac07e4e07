"""How commands call a running server."""

import os
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Generic, TypeVar

import typer

from penstock.cli.output import say
from penstock.kernel.errors import TimedOut, Transient

if TYPE_CHECKING:
    from penstock.flows.client import FlowClient
    from penstock.harvest.client import HarvestClient
    from penstock.overview.client import OverviewClient
    from penstock.refdata.client import PodClient, RefdataClient
    from penstock.tracking.client import PipelineClient

C = TypeVar("C")
T = TypeVar("T")
URL = "http://127.0.0.1:8080"
UrlOption = Annotated[
    str, typer.Option("--url", envvar="PENSTOCK_URL", help="The server; a token is taken from PENSTOCK_TOKEN.")
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Until the run ended, and show how far it is.")]
WaitTimeoutOption = Annotated[float, typer.Option("--timeout", help="Seconds to wait at most.", min=1)]


class ServerClient(Generic[C]):
    """Asks with one client, which is loaded when somebody asks: `--help` must not wait for it."""

    def __init__(self, client: str) -> None:
        self._module, _, self._name = client.partition(":")

    def __call__(self, url: str, question: Callable[[C], Awaitable[T]], *, timeout: float = 30) -> T:
        """What the server at *url* answers to *question*."""
        import asyncio
        from importlib import import_module

        client_of = getattr(import_module(self._module), self._name)

        async def asking() -> T:
            async with client_of(url, token=os.environ.get("PENSTOCK_TOKEN"), timeout=timeout) as client:
                return await question(client)

        return asyncio.run(asking())


ask_flows: "ServerClient[FlowClient]" = ServerClient("penstock.flows.client:FlowClient")
ask_harvest: "ServerClient[HarvestClient]" = ServerClient("penstock.harvest.client:HarvestClient")
ask_overview: "ServerClient[OverviewClient]" = ServerClient("penstock.overview.client:OverviewClient")
ask_pod: "ServerClient[PodClient]" = ServerClient("penstock.refdata.client:PodClient")
ask_refdata: "ServerClient[RefdataClient]" = ServerClient("penstock.refdata.client:RefdataClient")
ask_tracking: "ServerClient[PipelineClient]" = ServerClient("penstock.tracking.client:PipelineClient")


async def until(
    look: Callable[[], Awaitable[T | None]], timeout: float, late: Callable[[], TimedOut], *, every: float
) -> T:
    """What *look* finds, looking at least once and then again and again; *late* is raised when that takes too long."""
    import asyncio
    from time import monotonic

    deadline = monotonic() + timeout
    while (found := await look()) is None:
        if monotonic() >= deadline:
            raise late()
        await asyncio.sleep(every)
    return found


async def until_ended(look: Callable[[], Awaitable[T | None]], run_id: str, timeout: float, shown_by: str) -> T:
    """What *look* tells of a run that ended; a server that is restarted meanwhile does not end the run."""

    async def patiently() -> T | None:
        try:
            return await look()
        except Transient as error:
            say(f"{error.message}; still waiting")
            return None

    def late() -> TimedOut:
        hint = f"it goes on; `{shown_by}` shows it"
        return TimedOut("STILL_RUNNING", f"run {run_id} takes longer than {timeout:g} s", hint=hint)

    return await until(patiently, timeout, late, every=0.5)


def moment(text: str) -> str:
    """A server's time for people."""
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S}"
