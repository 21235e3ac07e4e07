"""Steps of charts for tests: what they ask for, and what their manifest tells."""

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


def asked(*names: str, **more: Any) -> Json:
    return {"requests": [{"id": name} for name in names], "files": FILES, **more}


def drawn_by(api: ScriptedMarketServer, **more: Any) -> Workers:
    images = {"url": f"{api.url}/render?key=hidden", "token": TOKEN_REF, **more}
    section = FlowsSection.model_validate({"images": images})
    return make_workers(KindContext(section, clock=ManualClock(BEGIN), pause=api.pause))


HERE = make_workers(KindContext(FlowsSection()))


def told(step_io: RunStepIO) -> tuple[list[str], list[tuple[str, str]]]:
    """Which pictures came, and which did not, by the manifest."""
    manifest = step_io.document("chart", "manifest.json")
    return [each["id"] for each in manifest["items"]], [(each["id"], each["code"]) for each in manifest["failures"]]


def walk(number: int, price: float = 100.0, restless: float = 0.01, apart: timedelta = HOUR) -> list[Candle]:
    """Candles of a made-up market, always the same."""
    chance, candles = random.Random(3), []
    for n in range(number):
        close = price * math.exp(chance.gauss(0, restless))
        high, low = max(price, close) * (1 + restless / 2), min(price, close) * (1 - restless / 2)
        candles.append(Candle(BEGIN + n * apart, price, high, low, close, 1_000 * chance.random()))
        price = close
    return candles
