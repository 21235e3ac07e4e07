"""How a process is: alive, ready, and what it depends on."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from time import monotonic
from typing import Any, Literal

import structlog
from fastapi import APIRouter, Response
from pydantic import BaseModel

from penstock.kernel.errors import PenstockError
from penstock.kernel.telemetry.telemetry import Telemetry

Check = Callable[[], Awaitable[object]]
CHECK_TIMEOUT = 3.0
FRESH_FOR = 1.0  # probes of many watchers must not become a load of their own
SELDOM = 60.0
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
Status = Literal["UP", "DOWN"]


class HealthComponent(BaseModel):
    """One dependency."""

    status: Status
    code: str | None = None
    detail: str | None = None


class HealthChecks(BaseModel):
    """UP when every component is."""

    status: Status
    components: dict[str, HealthComponent] = {}


class LivenessPulse:
    """What a process knows of itself: whether it has begun, is ending, and how its dependencies do."""

    def __init__(
        self,
        checks: Mapping[str, Check],
        *,
        needs: Collection[str],
        seldom: Collection[str] = (),
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        self._checks = {
            name: _CachedCheck(check, SELDOM if name in seldom else FRESH_FOR) for name, check in checks.items()
        }
        self._needs = needs  # without these it cannot serve; the loss of any other must not take it out of service
        self._on_drain = on_drain
        self.is_serving = False  # false until all is loaded, and again when it drains
        self.is_draining = False

    def drain(self) -> None:
        """It is about to stop: whoever asks is sent elsewhere."""
        self.is_serving, self.is_draining = False, True
        self._on_drain()

    async def health(self) -> HealthChecks:
        return _health(await self._ask(self._checks))

    async def readiness(self) -> HealthChecks:
        serving = HealthComponent(status="UP" if self.is_serving else "DOWN")
        return _health({"serving": serving, **await self._ask(self._needs)})

    async def exposition(self, telemetry: Telemetry) -> bytes:
        """The metrics, with how the process is at this moment."""
        health, readiness = await self.health(), await self.readiness()
        components = {name: one.status == "UP" for name, one in health.components.items()}
        telemetry.health.tell(components, is_ready=readiness.status == "UP")
        return telemetry.exposition()

    async def _ask(self, names: Iterable[str]) -> dict[str, HealthComponent]:
        wanted = list(names)
        found = await asyncio.gather(*(self._checks[name].ask() for name in wanted))
        return dict(zip(wanted, found, strict=True))


class _CachedCheck:
    """A check whose answer is good for a moment; for longer when all is well and to ask costs something."""

    def __init__(self, check: Check, well_for: float) -> None:
        self._check = check
        self._well_for = well_for
        self._answer = HealthComponent(status="DOWN")
        self._asked_at = -FRESH_FOR
        self._asking = asyncio.Lock()

    async def ask(self) -> HealthComponent:
        async with self._asking:
            good_for = self._well_for if self._answer.status == "UP" else FRESH_FOR
            if monotonic() - self._asked_at >= good_for:
                self._answer, self._asked_at = await _component(self._check), monotonic()
            return self._answer


def router(pulse: LivenessPulse, telemetry: Telemetry) -> APIRouter:
    """R17: health with liveness and readiness, and the metrics."""
    routes = APIRouter(prefix="/actuator", tags=["actuator"])
    down: dict[int | str, dict[str, Any]] = {503: {"model": HealthChecks, "description": "Not now"}}

    @routes.get("/health", responses=down, response_model_exclude_none=True)
    async def health(response: Response) -> HealthChecks:
        return _answer(await pulse.health(), response)

    @routes.get("/health/liveness", response_model_exclude_defaults=True)
    async def liveness() -> HealthChecks:
        """UP whenever this can be answered: restarting the process would help nothing that is wrong elsewhere."""
        return HealthChecks(status="UP")

    @routes.get("/health/readiness", responses=down, response_model_exclude_none=True)
    async def readiness(response: Response) -> HealthChecks:
        return _answer(await pulse.readiness(), response)

    @routes.get("/prometheus", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def prometheus() -> Response:
        return Response(await pulse.exposition(telemetry), media_type=EXPOSITION)

    return routes


def _health(components: dict[str, HealthComponent]) -> HealthChecks:
    up = all(component.status == "UP" for component in components.values())
    return HealthChecks(status="UP" if up else "DOWN", components=components)


def _answer(health: HealthChecks, response: Response) -> HealthChecks:
    response.status_code = 200 if health.status == "UP" else 503
    return health


async def _component(check: Check) -> HealthComponent:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT):
            await check()
    except PenstockError as error:
        return HealthComponent(status="DOWN", code=error.code, detail=error.hint)
    except TimeoutError:
        return HealthComponent(status="DOWN", code="TIMED_OUT", detail=f"no answer within {CHECK_TIMEOUT:g} s")
    except Exception:  # noqa: BLE001 - the edge: a check's bug must not hide what the others say
        structlog.get_logger().exception("check_crashed")
        return HealthComponent(status="DOWN", code="CHECK_CRASHED", detail="see the log")
    return HealthComponent(status="UP")
