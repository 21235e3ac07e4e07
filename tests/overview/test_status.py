"""The status report: failures of single parts, and disks that are nearly full."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.kernel.errors import Transient
from penstock.kernel.http.health import LivenessPulse
from penstock.kernel.status import IssueSeverity, PartReport, StatusIssue, make_late_issue
from penstock.overview import status
from penstock.overview.disks import DiskUsage, read_disk, report_disks
from penstock.overview.status import StatusBoard

NOW = datetime(2026, 11, 17, 3, 0, tzinfo=UTC)
GIB = 1 << 30


def make_board(**checks: Callable[[], Awaitable[PartReport]]) -> StatusBoard:
    return StatusBoard(LivenessPulse({}, needs=[]), checks, lambda: NOW)


async def test_a_part_without_an_answer_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """T16: a part that cannot answer is BROKEN; the issues of the others are reported; the worst severity counts."""
    monkeypatch.setattr(status, "_CHECK_TIMEOUT", 0.05)

    async def slow() -> PartReport:
        return PartReport("fine", [make_late_issue("x", "slow")])

    async def down() -> PartReport:
        raise Transient("DATABASE_DOWN", "no PostgreSQL", hint="start it")

    async def crashes() -> PartReport:
        raise ZeroDivisionError

    async def hangs() -> PartReport:
        await asyncio.Event().wait()
        raise AssertionError

    assert (await make_board().read_status()).status == "OK"
    assert (await make_board(slow=slow).read_status()).status == "LATE"
    report = await make_board(slow=slow, down=down, crashes=crashes, hangs=hangs).read_status()
    assert report.status == "BROKEN"
    assert {part.part: [issue.problem for issue in part.issues] for part in report.parts} == {
        "platform": [],
        "slow": ["slow"],
        "down": ["DATABASE_DOWN: no PostgreSQL"],
        "crashes": ["the status check failed: ZeroDivisionError"],
        "hangs": ["no answer within 0.05 s"],
    }
    assert [part.summary for part in report.parts][2:] == ["status unknown"] * 3


async def test_a_component_that_is_down_is_broken() -> None:
    """R23: a component that is down is reported with the code of its error and the next step."""

    async def down() -> None:
        raise Transient("REDIS_DOWN", "no Redis", hint="start it")

    report = await StatusBoard(LivenessPulse({"signals": down}, needs=[]), {}, lambda: NOW).read_status()
    (platform,) = report.parts
    assert platform.summary == "0 of 1 component up"
    (issue,) = platform.issues
    assert StatusIssue(issue.severity, issue.subject, issue.problem, issue.hint) == StatusIssue(
        IssueSeverity.BROKEN, "signals", "is down: REDIS_DOWN", "start it"
    )


def fake_disks(disks: Mapping[str, DiskUsage]) -> Callable[[Path], DiskUsage]:
    def read(folder: Path) -> DiskUsage:
        if str(folder) not in disks:
            raise FileNotFoundError(folder)
        return disks[str(folder)]

    return read


@pytest.mark.parametrize(
    ("total", "free", "severity"),
    [
        (1000 * GIB, 60 * GIB, None),
        (1000 * GIB, 49 * GIB, "LATE"),  # less than 5 %
        (1000 * GIB, 9 * GIB, "BROKEN"),  # less than 1 %
        (12 * GIB, 2 * GIB, None),
        (12 * GIB, GIB - 1, "LATE"),  # more than 5 %, but less than 1 GiB
        (12 * GIB, GIB // 6, "BROKEN"),
        (GIB // 2, GIB // 4, None),  # a small disk never has 1 GiB free
        (GIB // 2, GIB // 50, "LATE"),
        (GIB // 2, 0, "BROKEN"),
    ],
)
async def test_a_disk_that_is_nearly_full_is_an_issue(total: int, free: int, severity: str | None) -> None:
    """The issue names the folder and the free bytes, and the hint says what to do."""
    report = await report_disks([Path("/data")], fake_disks({"/data": DiskUsage(1, total, free)}))
    assert [issue.severity for issue in report.issues] == ([severity] if severity else [])
    for issue in report.issues:
        assert issue.subject == "/data"
        assert f"{free:,} of {total:,} bytes are free" in issue.problem
        assert issue.hint is not None
        assert issue.hint.startswith("df -h /data;")


async def test_a_file_system_is_reported_once() -> None:
    """Several folders of one file system make one issue; folders that do not exist yet make none."""
    full, other = DiskUsage(1, 100 * GIB, GIB), DiskUsage(2, 100 * GIB, 50 * GIB)
    disks = fake_disks({"/data": full, "/data/objects": full, "/ingest": other})
    report = await report_disks([*map(Path, ("/data", "/data/objects", "/ingest", "/missing"))], disks)
    assert report.summary == "1.0 GiB free at /data, 50.0 GiB free at /ingest"
    assert [issue.subject for issue in report.issues] == ["/data"]
    assert (await report_disks([Path("/missing")], disks)).summary == "no local folder is in use"


async def test_a_disk_that_cannot_be_read_is_broken() -> None:
    """An I/O error of a disk makes the part BROKEN, with the folder in the problem."""

    def fail(_folder: Path) -> DiskUsage:
        raise OSError(5, "Input/output error")

    report = await make_board(disks=lambda: report_disks([Path("/data")], fail)).read_status()
    (issue,) = report.parts[1].issues
    assert (issue.severity, report.status) == (IssueSeverity.BROKEN, "BROKEN")
    assert issue.problem == "DISK_UNREADABLE: cannot read the free space of /data: Input/output error"


def test_the_usage_of_a_real_folder_is_read(tmp_path: Path) -> None:
    """The device identifies the file system; a missing folder is an error."""
    usage = read_disk(tmp_path)
    assert usage.device == tmp_path.stat().st_dev
    assert 0 < usage.free <= usage.total
    with pytest.raises(FileNotFoundError):
        read_disk(tmp_path / "missing")
