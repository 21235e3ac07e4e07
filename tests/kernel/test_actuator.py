"""How a process is: alive, ready, and what it depends on."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI

from penstock.kernel import actuator
from penstock.kernel.actuator import Pulse
from penstock.kernel.errors import Transient
from penstock.kernel.telemetry import Telemetry


async def well() -> None:
    pass


async def down() -> None:
    raise Transient("SIGNALS_DOWN", "no answer from redis-0", hint="start it")


async def hanging() -> None:
    await asyncio.Event().wait()


def http(pulse: Pulse) -> httpx.AsyncClient:
    app = FastAPI()
    app.include_router(actuator.router(pulse, Telemetry()))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost/actuator")


async def test_a_lost_helper_does_not_take_the_process_out_of_service() -> None:
    """R23: with Redis down health says so, while readiness, which needs only the database, stays UP."""
    pulse = Pulse({"database": well, "signals": down}, needs=["database"])
    pulse.is_serving = True
    async with http(pulse) as client:
        health, ready = await client.get("/health"), await client.get("/health/readiness")
    assert (health.status_code, health.json()["components"]["signals"]["code"]) == (503, "SIGNALS_DOWN")
    assert (ready.status_code, ready.json()) == (
        200,
        {"status": "UP", "components": {"serving": {"status": "UP"}, "database": {"status": "UP"}}},
    )


async def test_without_what_it_needs_it_is_alive_but_not_ready() -> None:
    """R23: a process whose database is away must not be restarted for it, and gets no requests."""
    pulse = Pulse({"database": down}, needs=["database"])
    pulse.is_serving = True
    async with http(pulse) as client:
        assert (await client.get("/health/readiness")).status_code == 503
        assert (await client.get("/health/liveness")).json() == {"status": "UP"}


async def test_before_it_serves_it_is_not_ready() -> None:
    """R23: not ready until all is loaded, and not while it drains."""
    pulse = Pulse({}, needs=[])
    assert (await pulse.readiness()).status == "DOWN"
    pulse.is_serving = True
    assert (await pulse.readiness()).status == "UP"


async def test_a_dependency_that_hangs_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe is answered in time, whatever does not answer it."""
    monkeypatch.setattr(actuator, "CHECK_TIMEOUT", 0.01)
    health = await Pulse({"bus": hanging}, needs=[]).health()
    assert health.components["bus"].code == "TIMED_OUT"


async def test_many_probes_ask_once() -> None:
    """Watchers do not become a load on what they watch."""
    asked = 0

    async def count() -> None:
        nonlocal asked
        asked += 1

    pulse = Pulse({"database": count}, needs=[])
    await asyncio.gather(*(pulse.health() for _ in range(50)))
    assert asked == 1
