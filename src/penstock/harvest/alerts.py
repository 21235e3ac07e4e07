"""H12: alerts are written in the transaction that gives cause for them, and told afterwards, by every channel."""

from datetime import datetime
from enum import StrEnum
from uuid import UUID

from penstock.kernel.db import sql
from penstock.kernel.db.database import Connection

SQL = sql.load("penstock.harvest", file="alerts.sql")


class Severity(StrEnum):
    """How soon somebody has to look."""

    WARNING = "WARNING"
    ERROR = "ERROR"
    CRITICAL = "CRITICAL"


class Code(StrEnum):
    """What alerts are about."""

    PLAN_FAILED = "PLAN_FAILED"
    CONSOLIDATION_SKIPPED = "CONSOLIDATION_SKIPPED"
    CONSOLIDATION_FAILED = "CONSOLIDATION_FAILED"
    WATERMARK_NOT_SAVED = "WATERMARK_NOT_SAVED"
    DELETION_SKIPPED = "DELETION_SKIPPED"
    RUN_FORCED = "RUN_FORCED"
    NO_PROGRESS = "NO_PROGRESS"


async def raise_alert(
    tx: Connection, feed: str, run_id: UUID | None, code: Code, severity: Severity, message: str, now: datetime
) -> None:
    """Have somebody told, if and only if *tx* commits."""
    await tx.execute(SQL["raise"], feed, run_id, code, severity, message, now)
