"""The status report: what is late or broken in all parts. A part that fails to answer is BROKEN and hides no other."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime

import structlog

from penstock import __version__
from penstock.kernel.errors import PenstockError
from penstock.kernel.http.health import LivenessPulse
from penstock.kernel.status import IssueSeverity, PartReport, make_broken_issue, pluralize
from penstock.overview import schemas

OK = "OK"
PLATFORM, BUS, DISKS = "platform", "bus", "disks"
_CHECK_TIMEOUT = 10.0

StatusCheck = Callable[[], Awaitable[PartReport]]


class StatusBoard:
    """The status checks of all parts, by the name of the part."""

    def __init__(self, pulse: LivenessPulse, checks: Mapping[str, StatusCheck], now: Callable[[], datetime]) -> None:
        self._checks: Mapping[str, StatusCheck] = {PLATFORM: self._check_platform, **checks}
        self._pulse = pulse
        self._now = now

    async def read_status(self) -> schemas.StatusReport:
        """Run all checks at once and return their reports; the status of the whole is the worst of all issues."""
        reports = await asyncio.gather(*(_run_check(name, check) for name, check in self._checks.items()))
        parts = [
            schemas.PartStatus(
                part=name, summary=report.summary, issues=[*map(schemas.IssueView.model_validate, report.issues)]
            )
            for name, report in zip(self._checks, reports, strict=True)
        ]
        severities = {issue.severity for report in reports for issue in report.issues}
        worst = next((severity.value for severity in IssueSeverity if severity in severities), OK)
        return schemas.StatusReport(status=worst, at=self._now(), version=__version__, parts=parts)

    async def _check_platform(self) -> PartReport:
        """Return the health of the components that all parts use."""
        components = (await self._pulse.check_health()).components
        down = {name: component for name, component in components.items() if component.status == "DOWN"}
        issues = [
            make_broken_issue(
                name, f"is down: {component.code or 'it did not answer'}", component.detail or "penstock doctor"
            )
            for name, component in sorted(down.items())
        ]
        return PartReport(f"{len(components) - len(down)} of {pluralize(len(components), 'component')} up", issues)


async def _run_check(name: str, check: StatusCheck) -> PartReport:
    try:
        async with asyncio.timeout(_CHECK_TIMEOUT):
            return await check()
    except PenstockError as error:
        return _report_failure(name, f"{error.code}: {error.message}", error.hint)
    except TimeoutError:
        return _report_failure(name, f"no answer within {_CHECK_TIMEOUT:g} s", "penstock doctor")
    except Exception as error:  # noqa: BLE001 - an edge: a bug in one part must not hide the issues of the others
        structlog.get_logger().exception("status_check_crashed", part=name)
        hint = "search the log of the server for status_check_crashed"
        return _report_failure(name, f"the status check failed: {type(error).__name__}", hint)


def _report_failure(name: str, problem: str, hint: str | None) -> PartReport:
    return PartReport("status unknown", [make_broken_issue(name, problem, hint)])
