"""`penstock harvest source`: a simulated paged API, to try and to measure harvest."""

import os
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal.options import JsonOption

if TYPE_CHECKING:
    from penstock.harvest.simulator.server import LocalOptions, LocalSource


def _make_rate_option(failure: str) -> Any:
    return typer.Option(metavar="RATE", min=0, max=1, help=f"Fraction of requests {failure} (0 to 1).")


class PricesChoice(StrEnum):
    """The distribution of prices."""

    HEAVY = "heavy"
    EQUAL = "equal"
    UNIFORM = "uniform"


class OrderChoice(StrEnum):
    """The order of records in pages."""

    PRICE = "price"
    ID = "id"


def source(
    records: Annotated[
        int, typer.Option(metavar="N", min=0, max=10_000_000, help="Number of records at the start.")
    ] = 500_000,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Seed of the records, changes and failures: equal seeds give equal data.")
    ] = 7,
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Port to listen on; 0 takes a free port.")
    ] = 8090,
    prices: Annotated[PricesChoice, typer.Option(help="Distribution of prices.")] = PricesChoice.HEAVY,
    order: Annotated[OrderChoice, typer.Option(help="Order of records in pages.")] = OrderChoice.PRICE,
    username: Annotated[str, typer.Option(metavar="NAME", help="User name of the GraphQL API.")] = "demo@example.com",
    password: Annotated[str, typer.Option(metavar="TEXT", help="Password of the GraphQL API.")] = "demo",  # noqa: S107 - the records are synthetic
    token_lifetime: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Lifetime of a GraphQL token.")
    ] = 21_600,
    latency_ms: Annotated[
        float, typer.Option(metavar="MS", min=0, help="Delay of every response in milliseconds.")
    ] = 0,
    rate_429: Annotated[float, _make_rate_option("answered with status 429")] = 0,
    retry_after: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Value of Retry-After in responses with status 429.")
    ] = 1,
    rate_500: Annotated[float, _make_rate_option("answered with status 500")] = 0,
    rate_timeout: Annotated[float, _make_rate_option("that are never answered")] = 0,
    rate_short: Annotated[float, _make_rate_option("answered with too few records")] = 0,
    rate_garbage: Annotated[float, _make_rate_option("answered with invalid JSON")] = 0,
    rate_cut: Annotated[float, _make_rate_option("whose response is cut off")] = 0,
    churn: Annotated[float, typer.Option(metavar="N", min=0, max=100_000, help="Records updated per second.")] = 0,
    json: JsonOption = False,
) -> None:
    """Simulate a paged REST and GraphQL API with failures and changes, until Ctrl-C or SIGTERM."""
    from datetime import timedelta

    import uvloop

    from penstock.harvest.simulator.dataset import PriceFormat, RecordOrder
    from penstock.harvest.simulator.faults import Faults, Rates
    from penstock.harvest.simulator.server import LocalOptions

    options = LocalOptions(
        records=records,
        seed=seed,
        prices=PriceFormat(prices.value),
        order=RecordOrder(order.value),
        host=host,
        port=port,
        username=username,
        password=password,
        token_lifetime=timedelta(seconds=token_lifetime),
        faults=Faults(
            latency_ms=latency_ms,
            rate_429=rate_429,
            retry_after=retry_after,
            rate_500=rate_500,
            rate_timeout=rate_timeout,
            rate_short=rate_short,
            rate_garbage=rate_garbage,
            rate_cut=rate_cut,
        ),
        churn=Rates(updates=churn),
    )
    uvloop.run(_serve(options, json))


async def _serve(options: "LocalOptions", as_json: bool) -> None:
    import asyncio
    import signal

    from penstock.harvest.simulator.server import run_local_source

    stopping = asyncio.Event()
    async with run_local_source(options) as running:
        # Not earlier: a signal ends the process while records are created.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        _print_address(running, options, as_json)
        await stopping.wait()


def _print_address(running: "LocalSource", options: "LocalOptions", as_json: bool) -> None:
    """Print JSON on one line, so that a program can read it line by line."""
    import json

    data = {"records": options.records, "seed": options.seed, "prices": options.prices, "order": options.order}
    event = {"event": "ready", "api": running.url, "pid": os.getpid(), **data}
    text = f"source    {running.url}\n{options.records:,} records by REST at /records and GraphQL at /graphql\nready"
    sys.stdout.write(f"{json.dumps(event) if as_json else text}\n")
    sys.stdout.flush()
