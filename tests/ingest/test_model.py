"""The id of a run."""

import re

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.ingest.model import RunStats, make_run_id
from penstock.kernel.clock import ManualClock


def test_a_run_id_is_as_the_document_says() -> None:
    """I5, §6: <supplier>_<YYYYMMDDTHHMMSSZ>_<rand6>, in UTC, and no two alike."""
    ids = {make_run_id("brinex", ManualClock()) for _ in range(200)}
    assert all(re.fullmatch(r"brinex_20260101T000000Z_[0-9a-f]{6}", one) for one in ids)
    assert len(ids) > 190


@given(good=st.integers(0, 10**9), bad=st.integers(0, 10**9))
@example(good=0, bad=0)
def test_the_ratio_is_of_all_rows(good: int, bad: int) -> None:
    """I7: bad rows by all rows that count; no rows are no bad rows."""
    ratio = RunStats(good_rows=good, bad_rows=bad).bad_ratio
    assert ratio == (bad / (good + bad) if good + bad else 0)
    assert 0 <= ratio <= 1
