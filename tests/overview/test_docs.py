"""docs/overview.md states the limits of the code."""

import re
from pathlib import Path

import pytest

from penstock.flows import status as flows
from penstock.ingest.model import IngestAlert
from penstock.kernel.states import event_stream
from penstock.kernel.text import format_duration
from penstock.overview import disks
from penstock.refdata import status as refdata
from penstock.tracking import status as tracking

pytestmark = pytest.mark.docs

PAGE = (Path(__file__).parents[2] / "docs" / "overview.md").read_text()


def test_the_limits_are_those_of_the_code() -> None:
    """T16, F18: the documented times, sizes and numbers of streams are those of the code."""
    rows = {row.split(" | ")[0].strip("| "): row for row in re.findall(r"^\| \w+ \|.*$", PAGE, re.MULTILINE)}
    assert format_duration(tracking.WAITS_TOO_LONG) in rows["tracking"]
    assert format_duration(flows.WAITS_TOO_LONG) in rows["flows"]
    assert format_duration(refdata.PENDING_TOO_LONG) in rows["refdata"]
    assert refdata.UNANNOUNCED_TOO_LONG.total_seconds() == 60
    assert refdata.FAILED_WITHIN.days == flows.FAILED_WITHIN.days == 1
    assert all(alert in rows["ingest"] for alert in IngestAlert)
    assert (disks.LOW_RATIO, disks.LOW_BYTES, disks.CRITICAL_SHARE) == (0.05, 1 << 30, 0.2)
    assert "less than 5 % or 1 GiB" in rows["disks"]
    assert "less than 1 % or 200 MiB" in rows["disks"]
    assert f"{event_stream.STREAM_LIMIT} such streams" in PAGE
