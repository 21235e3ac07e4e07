"""What is late or broken, in one answer: each part is asked, and one that cannot answer hides nothing of the others."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime

import structlog

from penstock import __version__
from penstock.kernel.errors import PenstockError
from penstock.kernel.http.health import LivenessPulse
from penstock.kernel.status import IssueSeverity, PartReport, broken_issue, pluralize
from penstock.overview import schemas

OK = "OK"
PLATFORM = "platform"
_PATIENCE = 10.0

Look = Callable[[], Awaitable[PartReport]]


class StatusBoard:
    """The looks of all parts, under their names."""

    def __init__(self, pulse: LivenessPulse, looks: Mapping[str, Look], now: Callable[[], datetime]) -> None:
        self._looks: Mapping[str, Look] = {PLATFORM: self._platform, **looks}
        self._pulse = pulse
        self._now = now

    async def status(self) -> schemas.StatusReport:
        reports = await asyncio.gather(*(_report(name, look) for name, look in self._looks.items()))
        parts = [
            schemas.PartStatus(
                part=name, summary=report.summary, issues=[*map(schemas.IssueView.model_validate, report.issues)]
            )
            for name, report in zip(self._looks, reports, strict=True)
        ]
        found = {issue.severity for report in reports for issue in report.issues}
        worst = next((one.value for one in IssueSeverity if one in found), OK)
        return schemas.StatusReport(status=worst, at=self._now(), version=__version__, parts=parts)

    async def _platform(self) -> PartReport:
        """What all parts stand on."""
        components = (await self._pulse.health()).components
        down = {name: one for name, one in components.items() if one.status == "DOWN"}
        issues = [
            broken_issue(name, f"does not work: {one.code or 'no answer'}", one.detail or "penstock doctor")
            for name, one in sorted(down.items())
        ]
        return PartReport(f"{len(components) - len(down)} of {pluralize(len(components), 'component')} up", issues)


async def _report(name: str, look: Look) -> PartReport:
    try:
        async with asyncio.timeout(_PATIENCE):
            return await look()
    except PenstockError as error:
        return _silent(name, f"{error.code}: {error.message}", error.hint)
    except TimeoutError:
        return _silent(name, f"no answer within {_PATIENCE:g} s", "penstock doctor")
    except Exception as error:  # noqa: BLE001 - an edge: a mistake in one part must not hide what the others say
        structlog.get_logger().exception("status_crashed", part=name)
        return _silent(name, f"the look at it failed: {type(error).__name__}", "see the server's log")


def _silent(name: str, problem: str, hint: str | None) -> PartReport:
    return PartReport("cannot tell how it stands", [broken_issue(name, problem, hint)])
