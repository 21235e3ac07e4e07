"""Health of a process: liveness, readiness, the checks of its dependencies, and its metrics."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from time import monotonic
from typing import Any, Literal

import structlog
from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from penstock.kernel.errors import PenstockError
from penstock.kernel.telemetry.telemetry import Telemetry

Check = Callable[[], Awaitable[object]]
CHECK_TIMEOUT = 3.0
CACHE_SECONDS = 1.0  # the probes of many watchers must not become a load
EXPENSIVE_CACHE_SECONDS = 60.0
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
LIVENESS, READINESS = "/actuator/health/liveness", "/actuator/health/readiness"
HEALTH, METRICS = "/actuator/health", "/actuator/prometheus"
ALIASES = {"/healthz": LIVENESS, "/readyz": READINESS, "/metrics": METRICS}  # the paths that Kubernetes users expect
Status = Literal["UP", "DOWN"]


class HealthComponent(BaseModel):
    """The health of one dependency."""

    status: Status = Field(description="UP or DOWN.")
    code: str | None = Field(None, description="Code of the error, if the component is DOWN.")
    detail: str | None = Field(None, description="What to check next, if the component is DOWN.")


class HealthChecks(BaseModel):
    """The health of the process: UP if every component is UP."""

    status: Status = Field(description="UP or DOWN.")
    components: dict[str, HealthComponent] = Field({}, description="The components that were checked, by name.")


class LivenessPulse:
    """The health of a process: whether it has started, whether it is draining, and whether its dependencies answer."""

    def __init__(
        self,
        checks: Mapping[str, Check],
        *,
        needs: Collection[str],
        expensive: Collection[str] = (),
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        self._checks = {
            name: _CachedCheck(check, EXPENSIVE_CACHE_SECONDS if name in expensive else CACHE_SECONDS)
            for name, check in checks.items()
        }
        self._needs = needs  # the loss of any other dependency must not take the process out of service
        self._on_drain = on_drain
        self.is_serving = False  # false until everything is loaded, and again while draining
        self.is_draining = False

    def drain(self) -> None:
        """Fail readiness, because the process is about to stop."""
        self.is_serving, self.is_draining = False, True
        self._on_drain()

    async def check_health(self) -> HealthChecks:
        return _combine(await self._run_checks(self._checks))

    async def check_readiness(self) -> HealthChecks:
        serving = HealthComponent(status="UP" if self.is_serving else "DOWN")
        return _combine({"serving": serving, **await self._run_checks(self._needs)})

    async def format_metrics(self, telemetry: Telemetry) -> bytes:
        """Return the metrics, including the present health."""
        health, readiness = await self.check_health(), await self.check_readiness()
        components = {name: component.status == "UP" for name, component in health.components.items()}
        telemetry.health.set_components(components, is_ready=readiness.status == "UP")
        return telemetry.format_metrics()

    async def _run_checks(self, names: Iterable[str]) -> dict[str, HealthComponent]:
        selected = list(names)
        results = await asyncio.gather(*(self._checks[name].run() for name in selected))
        return dict(zip(selected, results, strict=True))


class _CachedCheck:
    """A check whose result is cached: a good result for *up_seconds*, a bad one for a second."""

    def __init__(self, check: Check, up_seconds: float) -> None:
        self._check = check
        self._up_seconds = up_seconds
        self._result = HealthComponent(status="DOWN")
        self._run_at = -CACHE_SECONDS
        self._running = asyncio.Lock()

    async def run(self) -> HealthComponent:
        async with self._running:
            valid_for = self._up_seconds if self._result.status == "UP" else CACHE_SECONDS
            if monotonic() - self._run_at >= valid_for:
                self._result, self._run_at = await _run_check(self._check), monotonic()
            return self._result


def make_router(pulse: LivenessPulse, telemetry: Telemetry) -> APIRouter:
    """R17: return the routes for health, liveness, readiness and metrics; each of the last three has a short alias."""
    routes = APIRouter(tags=["actuator"])
    down: dict[int | str, dict[str, Any]] = {503: {"model": HealthChecks, "description": "DOWN"}}
    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}

    @routes.get(HEALTH, responses=down, response_model_exclude_none=True)
    async def health(response: Response) -> HealthChecks:
        """Return the health of all components, also of those that readiness does not need."""
        return _set_status(await pulse.check_health(), response)

    async def liveness() -> HealthChecks:
        """Return UP whenever the process can answer: a restart would not repair a dependency."""
        return HealthChecks(status="UP")

    async def readiness(response: Response) -> HealthChecks:
        """Return UP if the process can serve requests or do its work, else DOWN with status 503."""
        return _set_status(await pulse.check_readiness(), response)

    async def prometheus() -> Response:
        """Return the metrics of the process in the text format of Prometheus."""
        return Response(await pulse.format_metrics(telemetry), media_type=EXPOSITION)

    for path in _list_paths(LIVENESS):
        routes.get(path, response_model_exclude_defaults=True)(liveness)
    for path in _list_paths(READINESS):
        routes.get(path, responses=down, response_model_exclude_none=True)(readiness)
    for path in _list_paths(METRICS):
        routes.get(path, response_class=Response, responses=text)(prometheus)
    return routes


def _list_paths(path: str) -> list[str]:
    """Return *path* and its aliases."""
    return [path, *(alias for alias, target in ALIASES.items() if target == path)]


def _combine(components: dict[str, HealthComponent]) -> HealthChecks:
    is_up = all(component.status == "UP" for component in components.values())
    return HealthChecks(status="UP" if is_up else "DOWN", components=components)


def _set_status(health: HealthChecks, response: Response) -> HealthChecks:
    response.status_code = 200 if health.status == "UP" else 503
    return health


async def _run_check(check: Check) -> HealthComponent:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT):
            await check()
    except PenstockError as error:
        return HealthComponent(status="DOWN", code=error.code, detail=error.hint)
    except TimeoutError:
        return HealthComponent(status="DOWN", code="TIMED_OUT", detail=f"the check took more than {CHECK_TIMEOUT:g} s")
    except Exception:  # noqa: BLE001 - a bug of one check must not hide the results of the others
        structlog.get_logger().exception("health_check_crashed")
        return HealthComponent(status="DOWN", code="CHECK_CRASHED", detail="search the log for health_check_crashed")
    return HealthComponent(status="UP")
