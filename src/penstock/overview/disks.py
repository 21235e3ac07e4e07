"""Free space on the file systems that Penstock writes to."""

import asyncio
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from penstock.kernel.errors import Transient
from penstock.kernel.status import IssueSeverity, PartReport, StatusIssue

# A full disk stops PostgreSQL, and a large delivery writes hundreds of megabytes within a minute. Most file systems get
# slow when less than 5 % is free. These limits leave an operator some hours.
LOW_RATIO = 0.05
LOW_BYTES = 1 << 30
# Below a fifth of the limits the next large run may fail.
CRITICAL_SHARE = 0.2
# A smaller file system, such as the memory of a container, is judged by its ratio alone: 1 GiB may be all it has.
SMALL_DISK_BYTES = 10 << 30


class DiskUsage(NamedTuple):
    """The size and the free bytes of one file system, identified by its device number."""

    device: int
    total: int
    free: int


ReadDisk = Callable[[Path], DiskUsage]


def read_disk(folder: Path) -> DiskUsage:
    """Return the usage of the file system of *folder*; FileNotFoundError if the folder is missing."""
    usage = shutil.disk_usage(folder)
    return DiskUsage(folder.stat().st_dev, usage.total, usage.free)


async def report_disks(folders: Iterable[Path], read: ReadDisk = read_disk) -> PartReport:
    """Return the free space of the file systems of *folders*, each once, and an issue for each that is nearly full."""
    # In a thread: a network file system may not answer for minutes.
    disks = await asyncio.to_thread(_read_disks, list(folders), read)
    issues = [issue for folder, usage in disks.items() if (issue := _find_issue(folder, usage))]
    free = ", ".join(f"{_format_size(usage.free)} free at {folder}" for folder, usage in disks.items())
    return PartReport(free or "no local folder is in use", issues)


def _read_disks(folders: Iterable[Path], read: ReadDisk) -> dict[Path, DiskUsage]:
    """Return the usage by folder; of the folders on one file system only the first."""
    disks: dict[int, tuple[Path, DiskUsage]] = {}
    for folder in folders:
        try:
            usage = read(folder)
        except FileNotFoundError:  # not created yet
            continue
        except OSError as error:
            hint = f"check the file system of {folder}"
            raise Transient(
                "DISK_UNREADABLE", f"cannot read the free space of {folder}: {error.strerror}", hint=hint
            ) from error
        disks.setdefault(usage.device, (folder, usage))
    return dict(disks.values())


def _find_issue(folder: Path, usage: DiskUsage) -> StatusIssue | None:
    low = LOW_RATIO * usage.total
    if usage.total >= SMALL_DISK_BYTES:
        low = max(low, LOW_BYTES)
    if usage.free >= low:
        return None
    severity = IssueSeverity.BROKEN if usage.free < CRITICAL_SHARE * low else IssueSeverity.LATE
    size = f"{usage.free:,} of {usage.total:,} bytes are free"
    problem = f"the file system is nearly full: {size}"
    return StatusIssue(severity, str(folder), problem, f"df -h {folder}; free some space or enlarge the volume")


def _format_size(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size // (1 << 20)} MiB"
