"""§16, DQ: the checks between reading a file and publishing it. No option bypasses them."""

from collections.abc import Collection
from dataclasses import dataclass

from penstock.ingest.contract import FailureCode
from penstock.ingest.model import PublicationDiff, RunFailed, RunStats, list_filled_categories
from penstock.ingest.supplier import Supplier


@dataclass(frozen=True)
class PreviousState:
    """The state with which a snapshot is compared."""

    run_id: str
    facts: int
    categories: Collection[str]


def check_quality(stats: RunStats, supplier: Supplier) -> None:
    """I7, §8: raise RunFailed if the rows of the run are not good enough."""
    if stats.bad_ratio > supplier.max_bad_ratio:
        message = f"{stats.bad_rows} of {stats.good_rows + stats.bad_rows} rows are bad: {stats.bad_ratio:.2%}"
        reason = min(stats.reasons, key=lambda code: (-stats.reasons[code], code), default="")
        hint = f"max_bad_ratio is {supplier.max_bad_ratio:.2%}; the most frequent reason is {reason}"
        raise RunFailed(FailureCode.DQ_TOO_MANY_BAD_ROWS, message, hint)
    if not stats.facts and not supplier.allow_empty_snapshot:
        hint = "to publish an empty snapshot, set allow_empty_snapshot: true in the configuration of the supplier"
        raise RunFailed(FailureCode.DQ_EMPTY_SNAPSHOT, "the file has no facts", hint)
    is_lifted = supplier.allow_empty_snapshot and not stats.facts and not stats.bad_rows
    if stats.facts < supplier.min_fact_count and not is_lifted:
        message = f"the file has {stats.facts} facts, fewer than min_fact_count ({supplier.min_fact_count})"
        hint = "check that the file is complete; if it is, lower min_fact_count in the configuration of the supplier"
        raise RunFailed(FailureCode.DQ_TOO_FEW_FACTS, message, hint)


def check_guards(stats: RunStats, changes: PublicationDiff, previous: PreviousState, supplier: Supplier) -> None:
    """I20: raise RunFailed if the snapshot differs too much from the previous state."""
    guards = supplier.guards
    hint = f"compare the file with run {previous.run_id}; if it is right, raise the guard in the configuration"
    dropped = _compute_percentage(previous.facts - stats.facts, previous.facts)
    if guards.max_drop_percent is not None and dropped > guards.max_drop_percent:
        message = f"{stats.facts} facts instead of {previous.facts}: {dropped:.1f} % fewer"
        limit = f"max_drop_percent is {guards.max_drop_percent:g}; "
        raise RunFailed(FailureCode.GUARD_ROWS_DROPPED, message, limit + hint)
    missing = sorted(set(previous.categories) - set(list_filled_categories(stats.categories)))
    if guards.vanished_categories == "fail" and missing:
        message = f"categories of the previous state are missing: {', '.join(missing)[:500]}"
        raise RunFailed(FailureCode.GUARD_CATEGORIES_VANISHED, message, hint)
    vanished = _compute_percentage(changes.removed, previous.facts)
    if guards.max_vanished_keys_percent is not None and vanished > guards.max_vanished_keys_percent:
        message = f"{changes.removed} of {previous.facts} keys of the previous state are missing: {vanished:.1f} %"
        limit = f"max_vanished_keys_percent is {guards.max_vanished_keys_percent:g}; "
        raise RunFailed(FailureCode.GUARD_KEYS_VANISHED, message, limit + hint)


def _compute_percentage(part: int, whole: int) -> float:
    return 100 * part / whole if whole > 0 else 0.0
