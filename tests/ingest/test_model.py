"""Ids and statistics of runs."""

import re

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.ingest.model import RunStats, make_run_id
from penstock.kernel.clock import ManualClock


def test_run_id_has_the_documented_form() -> None:
    """I5, §6: <supplier>_<YYYYMMDDTHHMMSSZ>_<rand6>, in UTC, and unique."""
    ids = {make_run_id("brinex", ManualClock()) for _ in range(200)}
    assert all(re.fullmatch(r"brinex_20260101T000000Z_[0-9a-f]{6}", run_id) for run_id in ids)
    assert len(ids) > 190


@given(good=st.integers(0, 10**9), bad=st.integers(0, 10**9))
@example(good=0, bad=0)
def test_bad_ratio_is_of_all_rows(good: int, bad: int) -> None:
    """I7: the ratio is bad rows by all rows; 0 without rows."""
    ratio = RunStats(good_rows=good, bad_rows=bad).bad_ratio
    assert ratio == (bad / (good + bad) if good + bad else 0)
    assert 0 <= ratio <= 1
