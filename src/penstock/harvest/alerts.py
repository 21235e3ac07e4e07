"""H12: alerts are written in the transaction that gives cause for them, and told afterwards, by every channel."""

import asyncio
import smtplib
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from email.message import EmailMessage
from enum import StrEnum
from typing import Any
from uuid import UUID

import aiohttp
import asyncpg
import structlog

from penstock.harvest.config import AlertsSection, SmtpSection, WebhookSection
from penstock.harvest.store import SQL
from penstock.kernel.config.loader import resolve_secret
from penstock.kernel.db.database import Connection, Database
from penstock.kernel.http.webhook import post_webhook
from penstock.kernel.tasks.backoff import compute_delay
from penstock.kernel.text import make_storable

ATTEMPTS = 60  # over more than a day, however chance has it
_FIRST_DELAY, _MAX_DELAY = timedelta(seconds=5), timedelta(hours=1)
_AT_ONCE = 20
_TIMEOUT = 15.0
# ValueError: a secret that no header, or no login, can hold.
_FAILURES = (OSError, TimeoutError, ValueError, aiohttp.ClientError, smtplib.SMTPException)

Channel = Callable[[Mapping[str, Any]], Awaitable[None]]


class AlertSeverity(StrEnum):
    """How soon somebody has to look."""

    WARNING = "WARNING"
    ERROR = "ERROR"
    CRITICAL = "CRITICAL"


class AlertCode(StrEnum):
    """What alerts are about."""

    PLAN_FAILED = "PLAN_FAILED"
    CONSOLIDATION_SKIPPED = "CONSOLIDATION_SKIPPED"
    CONSOLIDATION_FAILED = "CONSOLIDATION_FAILED"
    WATERMARK_NOT_SAVED = "WATERMARK_NOT_SAVED"
    DELETION_SKIPPED = "DELETION_SKIPPED"
    RUN_FORCED = "RUN_FORCED"
    NO_PROGRESS = "NO_PROGRESS"


async def raise_alert(
    tx: Connection,
    feed: str,
    run_id: UUID | None,
    code: AlertCode,
    severity: AlertSeverity,
    message: str,
    now: datetime,
) -> None:
    """Have somebody told, if and only if *tx* commits."""
    await tx.execute(SQL["raise_alert"], feed, run_id, code, severity, message, now)


class AlertSender:
    """Tells alerts that nobody was told of yet."""

    def __init__(self, db: Database, section: AlertsSection) -> None:
        self._db = db
        self._channels: dict[str, Channel] = {"log": _log}
        if section.email is not None:
            self._channels["email"] = _email(section.email)
        for number, webhook in enumerate(section.webhooks):
            self._channels[f"webhook {number + 1}"] = _webhook(webhook, number)

    async def tell(self) -> int:
        """Tell what is due; how many alerts somebody has still to be told of."""
        for _ in range(_AT_ONCE):
            if not await self._tell_next():
                break
        return int(await self._db.fetchval(SQL["count_untold_alerts"]))

    async def _tell_next(self) -> bool:
        """One alert, in a transaction of its own: what was told stays told, whatever becomes of the next."""
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            row = await tx.fetchrow(SQL["due_alert"], now)
            if row is None:
                return False
            told, error = await self._tell_one(row)
            is_told = not error or row["attempts"] + 1 >= ATTEMPTS
            due = now + compute_delay(row["attempts"] + 1, first=_FIRST_DELAY, limit=_MAX_DELAY)
            await tx.execute(SQL["note_alert"], row["id"], told, due, error and make_storable(error, 1_000), is_told)
            return True

    async def _tell_one(self, row: asyncpg.Record) -> tuple[list[str], str | None]:
        told, error = list(row["told"]), None
        for name, channel in self._channels.items():
            if name in told:
                continue
            try:
                await channel(_document(row))
                told.append(name)
            except _FAILURES as failure:
                error = f"{name}: {_reason(failure)}"
                structlog.get_logger().warning("alert_not_told", channel=name, error=error)
        return told, error


def _reason(failure: Exception) -> str:
    # An answer's error repeats the address, which for a webhook often is the secret.
    said = f"{failure.status} {failure.message}" if isinstance(failure, aiohttp.ClientResponseError) else str(failure)
    return f"{type(failure).__name__}: {said}"


def _document(row: asyncpg.Record) -> dict[str, Any]:
    return {
        "id": row["id"],
        "feed": row["feed"],
        "runId": str(row["run_id"]) if row["run_id"] else None,
        "code": row["code"],
        "severity": row["severity"],
        "message": row["message"],
        "raisedAt": row["raised_at"].isoformat(),
    }


async def _log(alert: Mapping[str, Any]) -> None:
    log = structlog.get_logger().bind(part="harvest")
    tell = {AlertSeverity.WARNING: log.warning, AlertSeverity.ERROR: log.error}.get(alert["severity"], log.critical)
    tell("alert", **alert)


def _email(section: SmtpSection) -> Channel:
    password = resolve_secret(section.password, "harvest.alerts.email.password") if section.password else None

    def send(message: EmailMessage) -> None:
        with smtplib.SMTP(section.host, section.port, timeout=_TIMEOUT) as server:
            if section.starttls:
                server.starttls()
            if section.username and password:
                server.login(section.username, password)
            server.send_message(message)

    async def tell(alert: Mapping[str, Any]) -> None:
        message = EmailMessage()
        message["Subject"] = f"[Penstock] {alert['severity']}: {alert['code']} ({alert['feed']})"
        message["From"], message["To"] = section.sender, ", ".join(section.to)
        # Of the alert's number: a mail that is sent again can be seen to be the same.
        message["Message-ID"] = f"<harvest-alert-{alert['id']}@penstock>"
        message.set_content("\n".join([alert["message"], "", *(f"{name}: {said}" for name, said in alert.items())]))
        await asyncio.to_thread(send, message)

    return tell


def _webhook(section: WebhookSection, number: int) -> Channel:
    place = f"harvest.alerts.webhooks.{number}.secret_headers"
    headers = {name: resolve_secret(secret, f"{place}.{name}") for name, secret in section.secret_headers.items()}

    async def tell(alert: Mapping[str, Any]) -> None:
        answer = await post_webhook(section.url, alert, headers, timeout=_TIMEOUT)
        if answer.status >= 300:
            reason = answer.reason or ""
            raise aiohttp.ClientResponseError(answer.request_info, (), status=answer.status, message=reason)

    return tell
