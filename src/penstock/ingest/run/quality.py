"""§16, DQ: whether what was read is good enough to be published. There is no way around it."""

from collections.abc import Collection
from dataclasses import dataclass

from penstock.ingest.contract import FailureCode
from penstock.ingest.model import PublicationDiff, RunFailed, RunStats, alive
from penstock.ingest.supplier import Supplier


@dataclass(frozen=True)
class PreviousState:
    """The state a snapshot is compared with."""

    run_id: str
    facts: int
    categories: Collection[str]


def check_quality(stats: RunStats, supplier: Supplier) -> None:
    """I7, §8; Failed when the rows are not good enough."""
    if stats.bad_ratio > supplier.max_bad_ratio:
        said = f"{stats.bad_rows} of {stats.good_rows + stats.bad_rows} rows are bad: {stats.bad_ratio:.2%}"
        most = min(stats.reasons, key=lambda code: (-stats.reasons[code], code), default="")
        hint = (
            f"max_bad_ratio is {supplier.max_bad_ratio:.2%}; most are {most}, `penstock ingest bad-rows RUN` shows them"
        )
        raise RunFailed(FailureCode.DQ_TOO_MANY_BAD_ROWS, said, hint)
    if not stats.facts and not supplier.allow_empty_snapshot:
        raise RunFailed(FailureCode.DQ_EMPTY_SNAPSHOT, "there are no facts", "allow_empty_snapshot is not set")
    is_lifted = supplier.allow_empty_snapshot and not stats.facts and not stats.bad_rows
    if stats.facts < supplier.min_fact_count and not is_lifted:
        said = f"there are {stats.facts} facts, fewer than min_fact_count, {supplier.min_fact_count}"
        raise RunFailed(FailureCode.DQ_TOO_FEW_FACTS, said, "is the file complete?")


def check_guards(stats: RunStats, changes: PublicationDiff, before: PreviousState, supplier: Supplier) -> None:
    """I20; Failed when the snapshot is too far from the one before it."""
    guards = supplier.guards
    hint = f"compare it with {before.run_id}; if it is right, raise the guard in the configuration"
    dropped = _percent(before.facts - stats.facts, before.facts)
    if guards.max_drop_percent is not None and dropped > guards.max_drop_percent:
        said = f"{stats.facts} facts where there were {before.facts}: {dropped:.1f} % fewer"
        raise RunFailed(FailureCode.GUARD_ROWS_DROPPED, said, hint)
    gone = sorted(set(before.categories) - set(alive(stats.categories)))
    if guards.vanished_categories == "fail" and gone:
        raise RunFailed(FailureCode.GUARD_CATEGORIES_VANISHED, f"gone are: {', '.join(gone)[:500]}", hint)
    vanished = _percent(changes.removed, before.facts)
    if guards.max_vanished_keys_percent is not None and vanished > guards.max_vanished_keys_percent:
        said = f"{changes.removed} of {before.facts} keys are gone: {vanished:.1f} %"
        raise RunFailed(FailureCode.GUARD_KEYS_VANISHED, said, hint)


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole > 0 else 0.0
