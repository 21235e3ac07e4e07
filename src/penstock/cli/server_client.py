"""Calls of commands to a running server."""

import os
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from penstock.cli.server_address import API, QUERY_API, ServerAddress, ServerKind, find_server
from penstock.cli.suggestion import make_pasteable
from penstock.cli.terminal.output import print_message
from penstock.kernel.errors import PenstockError, TimedOut, Transient

if TYPE_CHECKING:
    from penstock.flows.client import FlowClient
    from penstock.harvest.client import HarvestClient
    from penstock.ingest.api.client import IngestClient
    from penstock.overview.client import OverviewClient
    from penstock.refdata.client import PodClient, RefdataClient
    from penstock.tracking.client import PipelineClient

C = TypeVar("C")
T = TypeVar("T")
_HTTP_PART = re.compile(r"(?:(?<=^)|(?<=; ))(?:body|path|query)\.")  # where a value was in the request


class ServerClient(Generic[C]):
    """Call a server with a client class that is imported at the first call, because `--help` must not wait for it."""

    def __init__(self, client: str, kind: ServerKind = API) -> None:
        self._module, _, self._name = client.partition(":")
        self._kind = kind

    def __call__(self, url: str | None, call: Callable[[C], Awaitable[T]], *, timeout: float = 30) -> T:
        """Return the result of *call* at the server that *url*, the environment or the configuration names."""
        import asyncio
        from importlib import import_module

        address = find_server(url, self._kind)
        client_class = getattr(import_module(self._module), self._name)

        async def connect_and_call() -> T:
            async with client_class(address.url, token=os.environ.get("PENSTOCK_TOKEN"), timeout=timeout) as client:
                return await call(client)

        try:
            return asyncio.run(connect_and_call())
        except PenstockError as error:
            _explain(error, address)
            if error.hint:
                error.hint = make_pasteable(error.hint, **{self._kind.parameter: url})
            raise


def _explain(error: PenstockError, address: ServerAddress) -> None:
    """Reword *error* for a user of the command line: the address, and no names of HTTP."""
    kind = address.kind
    match error.code:
        case "SERVER_DOWN":
            error.hint = address.make_down_hint()
        case "NOT_A_PENSTOCK_SERVER":
            error.message = error.message.replace("the server", address.url, 1)
            error.hint = f"the address comes from {address.origin}; {kind.option} URL names another"
        case "NOT_FOUND":  # a route: the other server of Penstock, or a name that no route accepts
            error.message = f"{address.url}: {error.message}"
            error.hint = f"check the names, and that {kind.option} is the address of the {kind.description}"
        case "MALFORMED":
            error.message = _HTTP_PART.sub("", error.message)
            error.hint = "correct the value; --help describes the arguments and options of the command"


ask_flows: "ServerClient[FlowClient]" = ServerClient("penstock.flows.client:FlowClient")
ask_harvest: "ServerClient[HarvestClient]" = ServerClient("penstock.harvest.client:HarvestClient")
ask_ingest: "ServerClient[IngestClient]" = ServerClient("penstock.ingest.api.client:IngestClient")
ask_overview: "ServerClient[OverviewClient]" = ServerClient("penstock.overview.client:OverviewClient")
ask_pod: "ServerClient[PodClient]" = ServerClient("penstock.refdata.client:PodClient", QUERY_API)
ask_refdata: "ServerClient[RefdataClient]" = ServerClient("penstock.refdata.client:RefdataClient")
ask_tracking: "ServerClient[PipelineClient]" = ServerClient("penstock.tracking.client:PipelineClient")


async def poll_until(
    poll: Callable[[], Awaitable[T | None]], timeout: float, timed_out: Callable[[], TimedOut], *, interval: float
) -> T:
    """Call *poll* at least once, then every *interval* seconds, until it returns a result; else raise *timed_out*."""
    import asyncio
    from time import monotonic

    deadline = monotonic() + timeout
    while (result := await poll()) is None:
        if monotonic() >= deadline:
            raise timed_out()
        await asyncio.sleep(interval)
    return result


async def wait_for_run(poll: Callable[[], Awaitable[T | None]], run_id: str, timeout: float, shown_by: str) -> T:
    """Return what *poll* returns when the run has ended; a server that restarts does not end the wait.

    *shown_by* is the command that shows the run: the hint of TimedOut.
    """

    async def poll_patiently() -> T | None:
        try:
            return await poll()
        except Transient as error:
            print_message(f"{error.message}; still waiting")
            return None

    def make_timeout_error() -> TimedOut:
        hint = f"the run continues; `{shown_by}` shows it"
        return TimedOut("STILL_RUNNING", f"run {run_id} has not ended after {timeout:g} s", hint=hint)

    return await poll_until(poll_patiently, timeout, make_timeout_error, interval=0.5)
