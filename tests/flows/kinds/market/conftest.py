"""Fixtures of tests of the market kinds; a module may define its own `step_io` instead."""

from collections.abc import AsyncIterator

import pytest

from penstock.flows.kinds.market.candles import CandleSeries
from tests.flows.kinds.market.chart_steps import CANDLES
from tests.flows.kinds.market.run_step_io import RunStepIO
from tests.flows.market_servers import TOKEN, TOKEN_NAME, ScriptedMarketServer, market_server, picture


@pytest.fixture
def step_io() -> RunStepIO:
    step_io = RunStepIO()
    step_io.artifacts["ohlcv", "1h.json"] = CandleSeries("TIDE", "1h", CANDLES).as_bytes()
    return step_io


@pytest.fixture
async def api(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedMarketServer]:
    monkeypatch.setenv(TOKEN_NAME, TOKEN)
    async with market_server() as server:
        server.script(picture)
        yield server
