"""Chart steps for tests: their inputs, and the results in their manifest."""

import math
import random
from datetime import UTC, datetime, timedelta
from typing import Any

from penstock.flows.config import FlowsSection
from penstock.flows.kinds.market.candles import Candle
from penstock.flows.kinds.market.workers import make_workers
from penstock.flows.step import KindContext, Workers
from penstock.kernel.clock import ManualClock
from tests.flows.kinds.market.run_step_io import RunStepIO
from tests.flows.market_servers import TOKEN_REF, ScriptedMarketServer
from tests.support.types import Json

BEGIN = datetime(2026, 1, 5, tzinfo=UTC)
CANDLES = [Candle(BEGIN + timedelta(hours=n), 10 + n % 7, 18 + n % 5, 8, 11 + n % 6, 100 + n) for n in range(60)]
FILES = [{"step": "ohlcv", "name": "1h.json", "timeframe": "1h"}]
HOUR = timedelta(hours=1)


def chart_inputs(*names: str, **more: Any) -> Json:
    return {"requests": [{"id": name} for name in names], "files": FILES, **more}


def make_api_workers(api: ScriptedMarketServer, **more: Any) -> Workers:
    images = {"url": f"{api.url}/render?key=hidden", "token": TOKEN_REF, **more}
    section = FlowsSection.model_validate({"images": images})
    return make_workers(KindContext(section, clock=ManualClock(BEGIN), pause=api.pause))


LOCAL_WORKERS = make_workers(KindContext(FlowsSection()))


def read_results(step_io: RunStepIO) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the ids of the rendered charts, and the ids and codes of the failed ones, from the manifest."""
    manifest = step_io.document("chart", "manifest.json")
    return [each["id"] for each in manifest["items"]], [(each["id"], each["code"]) for each in manifest["failures"]]


def walk(number: int, price: float = 100.0, volatility: float = 0.01, interval: timedelta = HOUR) -> list[Candle]:
    """Return candles of an invented market; equal arguments have equal candles."""
    rng, candles = random.Random(3), []
    for n in range(number):
        close = price * math.exp(rng.gauss(0, volatility))
        high, low = max(price, close) * (1 + volatility / 2), min(price, close) * (1 - volatility / 2)
        candles.append(Candle(BEGIN + n * interval, price, high, low, close, 1_000 * rng.random()))
        price = close
    return candles
