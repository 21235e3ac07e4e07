"""The health of a process: liveness, readiness, and its dependencies."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from penstock.kernel.errors import Transient
from penstock.kernel.http import health as actuator
from penstock.kernel.http.health import LivenessPulse
from penstock.kernel.http.middleware import DrainMiddleware
from penstock.kernel.telemetry.telemetry import Telemetry


async def well() -> None:
    pass


async def down() -> None:
    raise Transient("SIGNALS_DOWN", "no answer from redis-0", hint="start it")


async def hanging() -> None:
    await asyncio.Event().wait()


def http(pulse: LivenessPulse) -> httpx.AsyncClient:
    app = FastAPI()
    app.include_router(actuator.make_router(pulse, Telemetry()))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost/actuator")


async def test_an_optional_dependency_does_not_affect_readiness() -> None:
    """R23: with Redis down health says so, while readiness, which needs only the database, stays UP."""
    pulse = LivenessPulse({"database": well, "signals": down}, needs=["database"])
    pulse.is_serving = True
    async with http(pulse) as client:
        health, ready = await client.get("/health"), await client.get("/health/readiness")
    assert (health.status_code, health.json()["components"]["signals"]["code"]) == (503, "SIGNALS_DOWN")
    assert (ready.status_code, ready.json()) == (
        200,
        {"status": "UP", "components": {"serving": {"status": "UP"}, "database": {"status": "UP"}}},
    )


async def test_without_a_required_dependency_a_process_is_alive_but_not_ready() -> None:
    """R23: a process whose database is down must not be restarted, and gets no requests."""
    pulse = LivenessPulse({"database": down}, needs=["database"])
    pulse.is_serving = True
    async with http(pulse) as client:
        assert (await client.get("/health/readiness")).status_code == 503
        assert (await client.get("/health/liveness")).json() == {"status": "UP"}


async def test_a_process_that_does_not_serve_is_not_ready() -> None:
    """R23: a process is not ready until everything is loaded, and not while it drains."""
    pulse = LivenessPulse({}, needs=[])
    assert (await pulse.check_readiness()).status == "DOWN"
    pulse.is_serving = True
    assert (await pulse.check_readiness()).status == "UP"


async def test_a_dependency_that_hangs_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe is answered in time, whichever dependency hangs."""
    monkeypatch.setattr(actuator, "CHECK_TIMEOUT", 0.01)
    health = await LivenessPulse({"bus": hanging}, needs=[]).check_health()
    assert health.components["bus"].code == "TIMED_OUT"


async def test_many_probes_run_a_check_once() -> None:
    """Probes do not become a load on the dependencies."""
    asked = 0

    async def count() -> None:
        nonlocal asked
        asked += 1

    pulse = LivenessPulse({"database": count}, needs=[])
    await asyncio.gather(*(pulse.check_health() for _ in range(50)))
    assert asked == 1


def samples(exposition: bytes, name: str) -> dict[str, float]:
    """Return the values of a metric by the values of its labels."""
    families = text_string_to_metric_families(exposition.decode())
    found = [sample for family in families for sample in family.samples if sample.name == name]
    return {",".join(sample.labels.values()): sample.value for sample in found}


async def test_the_metrics_contain_the_health() -> None:
    """R26, R27: readiness and each dependency are metrics for alerts, with their present values."""
    telemetry, pulse = Telemetry(), LivenessPulse({"database": well, "signals": down}, needs=["database"])
    before = await pulse.format_metrics(telemetry)
    pulse.is_serving = True
    after = await pulse.format_metrics(telemetry)
    assert (samples(before, "penstock_ready"), samples(after, "penstock_ready")) == ({"": 0}, {"": 1})
    assert samples(after, "penstock_component_up") == {"database": 1, "signals": 0}
    assert list(samples(after, "penstock_build_info").values()) == [1]
    assert samples(after, "process_start_time_seconds")


async def test_two_servers_of_a_process_export_their_own_health() -> None:
    """R27: a server does not export the dependencies of the other, in any order of requests."""
    telemetry = Telemetry()
    api, pod = LivenessPulse({"database": well}, needs=["database"]), LivenessPulse({"primary": down}, needs=[])
    api.is_serving = True
    assert samples(await pod.format_metrics(telemetry), "penstock_component_up") == {"primary": 0}
    text = await api.format_metrics(telemetry)
    assert samples(text, "penstock_component_up") == {"database": 1}
    assert samples(text, "penstock_ready") == {"": 1}


async def test_a_draining_server_closes_connections() -> None:
    """R23: a draining server is not ready, still answers, and closes the connection with each response."""
    calls: list[str] = []
    pulse = LivenessPulse({}, needs=[], on_drain=lambda: calls.append("drain"))
    pulse.is_serving = True
    app = FastAPI()
    app.include_router(actuator.make_router(pulse, Telemetry()))
    app.add_middleware(DrainMiddleware, pulse=pulse)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost/actuator") as client:
        assert "connection" not in (await client.get("/health/readiness")).headers
        pulse.drain()
        ready, live = await client.get("/health/readiness"), await client.get("/health/liveness")
    assert (ready.status_code, live.status_code, calls) == (503, 200, ["drain"])
    assert [answer.headers["connection"] for answer in (ready, live)] == ["close", "close"]


async def test_a_check_that_crashes_does_not_hide_the_others() -> None:
    """R26: a crashed check is DOWN, is logged, and the metrics of the others are exported."""

    async def crashed() -> None:
        raise RuntimeError("a bug")

    pulse = LivenessPulse({"database": well, "bus": crashed}, needs=[])
    assert samples(await pulse.format_metrics(Telemetry()), "penstock_component_up") == {"database": 1, "bus": 0}
    assert (await pulse.check_health()).components["bus"].code == "CHECK_CRASHED"


async def test_an_expensive_check_runs_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """R26: an expensive check runs rarely while it passes, and as often as the others when it fails."""
    monkeypatch.setattr(actuator, "CACHE_SECONDS", 0.0)
    asked: list[str] = []

    async def check() -> None:
        asked.append("storage")
        if len(asked) < 3:
            await down()

    pulse = LivenessPulse({"storage": check}, needs=[], expensive=["storage"])
    states = [(await pulse.check_health()).status for _ in range(6)]
    assert states == ["DOWN", "DOWN", "UP", "UP", "UP", "UP"]
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("alias", "path"),
    [
        ("/healthz", "/actuator/health/liveness"),
        ("/readyz", "/actuator/health/readiness"),
        ("/metrics", "/actuator/prometheus"),
    ],
)
async def test_short_paths_answer_like_the_actuator(alias: str, path: str) -> None:
    """/healthz, /readyz and /metrics have the response of the actuator route, and are in OpenAPI."""
    pulse = LivenessPulse({"database": down}, needs=["database"])
    app = FastAPI()
    app.include_router(actuator.make_router(pulse, Telemetry()))
    transport = httpx.ASGITransport(app)
    for is_serving in (False, True):
        pulse.is_serving = is_serving
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            short, long = await client.get(alias), await client.get(path)
        assert (short.status_code, _stable(short.text)) == (long.status_code, _stable(long.text))
    assert {alias, path} <= set(app.openapi()["paths"])


def _stable(text: str) -> str:
    """Return *text* without the metrics of the process itself, which change between two requests."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("process_"))
