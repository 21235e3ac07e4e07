"""`penstock harvest source`: the local source, to try and to measure harvest with."""

import os
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal.options import JsonOption

if TYPE_CHECKING:
    from penstock.harvest.simulator.server import LocalOptions, LocalSource

RateOption = Annotated[float, typer.Option(min=0, max=1, help="Which part of requests fails so.")]


class PricesChoice(StrEnum):
    """How prices are spread."""

    HEAVY = "heavy"
    EQUAL = "equal"
    UNIFORM = "uniform"


class OrderChoice(StrEnum):
    """How pages are sorted."""

    PRICE = "price"
    ID = "id"


def source(
    records: Annotated[int, typer.Option(min=0, max=10_000_000, help="How many there are at first.")] = 500_000,
    seed: Annotated[int, typer.Option(help="The same seed makes the same records, changes and faults.")] = 7,
    host: Annotated[str, typer.Option(help="Address to listen on: one of this machine's own.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8090,
    prices: Annotated[PricesChoice, typer.Option(help="How prices are spread.")] = PricesChoice.HEAVY,
    order: Annotated[OrderChoice, typer.Option(help="How pages are sorted.")] = OrderChoice.PRICE,
    username: Annotated[str, typer.Option(help="Who may ask by GraphQL.")] = "demo@example.com",
    password: Annotated[str, typer.Option(help="That user's.")] = "demo",  # noqa: S107 - it guards made-up records
    token_lifetime: Annotated[float, typer.Option(min=0, help="Seconds a token is good for.")] = 21_600,
    latency_ms: Annotated[float, typer.Option(min=0, help="How late every answer is.")] = 0,
    rate_429: RateOption = 0,
    retry_after: Annotated[float, typer.Option(min=0, help="Seconds a 429 asks to wait.")] = 1,
    rate_500: RateOption = 0,
    rate_timeout: RateOption = 0,
    rate_short: RateOption = 0,
    rate_garbage: RateOption = 0,
    rate_cut: RateOption = 0,
    churn: Annotated[float, typer.Option(min=0, max=100_000, help="Records updated a second.")] = 0,
    json: JsonOption = False,
) -> None:
    """Serve seeded records by REST and GraphQL, as badly as asked for, until Ctrl-C or SIGTERM."""
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

    from penstock.harvest.simulator.server import local_source

    stopping = asyncio.Event()
    async with local_source(options) as running:
        # Only now: while records are made, a signal ends the process as it always does.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        _tell(running, options, as_json)
        await stopping.wait()


def _tell(running: "LocalSource", options: "LocalOptions", as_json: bool) -> None:
    """On one line, so that a program knows when it has read all of it."""
    import json

    about = {"records": options.records, "seed": options.seed, "prices": options.prices, "order": options.order}
    told = {"event": "ready", "api": running.url, "pid": os.getpid(), **about}
    text = f"source    {running.url}\n{options.records:,} records by REST at /records and GraphQL at /graphql\nready"
    sys.stdout.write(f"{json.dumps(told) if as_json else text}\n")
    sys.stdout.flush()
