"""H12: alerts are inserted in the transaction of their cause, and delivered afterwards to every channel."""

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
from penstock.kernel.text import format_time, make_storable

ATTEMPTS = 60  # with any jitter, the delays add up to more than a day
_FIRST_DELAY, _MAX_DELAY = timedelta(seconds=5), timedelta(hours=1)
_BATCH = 20
_TIMEOUT = 15.0
# ValueError: a secret that is not valid in a header or a login.
_FAILURES = (OSError, TimeoutError, ValueError, aiohttp.ClientError, smtplib.SMTPException)

Channel = Callable[[Mapping[str, Any]], Awaitable[None]]
_log = structlog.get_logger()


class AlertSeverity(StrEnum):
    """Urgency of an alert."""

    WARNING = "WARNING"
    ERROR = "ERROR"
    CRITICAL = "CRITICAL"


class AlertCode(StrEnum):
    """Cause of an alert."""

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
    """Insert an alert, which is delivered if and only if *tx* commits."""
    await tx.execute(SQL["insert_alert"], feed, run_id, code, severity, message, now)


def log_failed_run(feed: str, run_id: UUID, code: AlertCode, error: str) -> None:
    """Log that a run has failed, after the transaction that failed it."""
    _log.warning("harvest_run_failed", feed=feed, run=str(run_id), code=code.value, error=error)


class AlertSender:
    """Delivers due alerts to the channels that have not accepted them yet."""

    def __init__(self, db: Database, section: AlertsSection) -> None:
        self._db = db
        self._channels: dict[str, Channel] = {"log": _log_alert}
        if section.email is not None:
            self._channels["email"] = _make_email_channel(section.email)
        for number, webhook in enumerate(section.webhooks):
            self._channels[f"webhook {number + 1}"] = _make_webhook_channel(webhook, number)

    async def send_due(self) -> int:
        """Deliver the due alerts, and return the number of alerts that a channel has not accepted yet."""
        for _ in range(_BATCH):
            if not await self._send_next():
                break
        return int(await self._db.fetchval(SQL["count_undelivered_alerts"]))

    async def _send_next(self) -> bool:
        """Deliver one alert in its own transaction, so that a failure of the next one does not undo the delivery."""
        async with self._db.transaction() as tx:
            now = self._db.clock.now()
            row = await tx.fetchrow(SQL["lock_due_alert"], now)
            if row is None:
                return False
            channels, error = await self._deliver(row)
            is_settled = not error or row["attempts"] + 1 >= ATTEMPTS
            due = now + compute_delay(row["attempts"] + 1, first=_FIRST_DELAY, limit=_MAX_DELAY)
            stored_error = error and make_storable(error, 1_000)
            await tx.execute(SQL["record_delivery"], row["id"], channels, due, stored_error, is_settled)
            return True

    async def _deliver(self, row: asyncpg.Record) -> tuple[list[str], str | None]:
        """Return the channels that have accepted the alert, and the last error."""
        accepted, error = list(row["delivered_to"]), None
        for name, channel in self._channels.items():
            if name in accepted:
                continue
            try:
                await channel(_make_document(row))
                accepted.append(name)
            except _FAILURES as failure:
                error = f"{name}: {_describe_failure(failure)}"
                _log.warning("alert_delivery_failed", alert=row["id"], feed=row["feed"], channel=name, error=error)
        return accepted, error


def _describe_failure(failure: Exception) -> str:
    # The text of a response error contains the URL, which is often a secret of a webhook.
    if isinstance(failure, aiohttp.ClientResponseError):
        return f"{type(failure).__name__}: {failure.status} {failure.message}"
    return f"{type(failure).__name__}: {failure}"


def _make_document(row: asyncpg.Record) -> dict[str, Any]:
    return {
        "id": row["id"],
        "feed": row["feed"],
        "runId": str(row["run_id"]) if row["run_id"] else None,
        "code": row["code"],
        "severity": row["severity"],
        "message": row["message"],
        "raisedAt": format_time(row["raised_at"]),
    }


async def _log_alert(alert: Mapping[str, Any]) -> None:
    log = {AlertSeverity.WARNING: _log.warning, AlertSeverity.ERROR: _log.error}.get(alert["severity"], _log.critical)
    log("harvest_alert_raised", **alert)


def _make_email_channel(section: SmtpSection) -> Channel:
    password = resolve_secret(section.password, "harvest.alerts.email.password") if section.password else None

    def send(message: EmailMessage) -> None:
        with smtplib.SMTP(section.host, section.port, timeout=_TIMEOUT) as server:
            if section.starttls:
                server.starttls()
            if section.username and password:
                server.login(section.username, password)
            server.send_message(message)

    async def deliver(alert: Mapping[str, Any]) -> None:
        message = EmailMessage()
        message["Subject"] = f"[Penstock] {alert['severity']}: {alert['code']} ({alert['feed']})"
        message["From"], message["To"] = section.sender, ", ".join(section.to)
        # Derived from the id of the alert, so that mail clients recognise a repeated mail.
        message["Message-ID"] = f"<harvest-alert-{alert['id']}@penstock>"
        message.set_content("\n".join([alert["message"], "", *(f"{name}: {value}" for name, value in alert.items())]))
        await asyncio.to_thread(send, message)

    return deliver


def _make_webhook_channel(section: WebhookSection, number: int) -> Channel:
    setting = f"harvest.alerts.webhooks.{number}.secret_headers"
    headers = {name: resolve_secret(secret, f"{setting}.{name}") for name, secret in section.secret_headers.items()}

    async def deliver(alert: Mapping[str, Any]) -> None:
        response = await post_webhook(section.url, alert, headers, timeout=_TIMEOUT)
        if response.status >= 300:
            reason = response.reason or ""
            raise aiohttp.ClientResponseError(response.request_info, (), status=response.status, message=reason)

    return deliver
