"""H12: alerts are delivered by log, e-mail and webhook: once per channel, until the channel accepts or is given up."""

import asyncio
import base64
import email
import email.policy
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import structlog
from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.harvest import contract
from penstock.harvest.alerts import ATTEMPTS, AlertCode, AlertSender, AlertSeverity, raise_alert
from penstock.harvest.config import AlertsSection
from penstock.harvest.simulator.faults import Faults
from penstock.harvest.simulator.server import LocalOptions
from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.kernel.errors import BadConfig
from penstock.kernel.text import make_storable
from tests.harvest.stepper import FEED, harvest_stepper

SECRET = "hunter2-and-more"
LONG = timedelta(days=1)
Logs = list[Any]


@dataclass
class MailServer:
    """A mail server that accepts every mail, unless *fails* is set."""

    user: str | None = None
    fails: bool = False
    port: int = 0
    mails: list[EmailMessage] = field(default_factory=list)
    logins: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def send(text: str) -> None:
            writer.write(f"{text}\r\n".encode())

        send("220 sink")
        while line := (await reader.readline()).decode().strip():
            word = line.split(" ")[0].upper()
            if word == "EHLO":
                send("250-sink")
                send("250 AUTH PLAIN" if self.user else "250 8BITMIME")
            elif word == "AUTH":
                self.logins.append(base64.b64decode(line.split(" ")[2]).decode())
                is_valid = self.logins[-1] == f"\0{self.user}\0{SECRET}"
                send("235 ok" if is_valid else "535 5.7.8 authentication failed")
            elif word == "MAIL" and (self.fails or (self.user and not self.logins)):
                send("451 not now")
            elif word == "DATA":
                send("354 continue")
                text = await reader.readuntil(b"\r\n.\r\n")
                self.mails.append(email.message_from_bytes(text[:-3], policy=email.policy.default))
                send("250 accepted")
            elif word == "QUIT":
                send("221 bye")
                break
            else:
                send("250 ok")
            await writer.drain()
        writer.close()


@asynccontextmanager
async def run_mail_server(**options: Any) -> AsyncIterator[MailServer]:
    sink = MailServer(**options)
    server = await asyncio.start_server(sink.serve, "127.0.0.1", 0)
    sink.port = server.sockets[0].getsockname()[1]
    try:
        yield sink
    finally:
        server.close()
        await server.wait_closed()


@dataclass
class WebhookRecorder:
    """A webhook that records the payloads it accepts."""

    status: int = 200
    url: str = ""
    payloads: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)

    async def take(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers)
        if self.status == 200:
            self.payloads.append(await request.json())
        return web.Response(status=self.status, headers={"Location": "/elsewhere"})


@asynccontextmanager
async def run_webhook() -> AsyncIterator[WebhookRecorder]:
    hook = WebhookRecorder()
    app = web.Application()
    app.router.add_post("/hook", hook.take)
    server = TestServer(app)
    await server.start_server()
    hook.url = str(server.make_url("/hook"))
    try:
        yield hook
    finally:
        await server.close()


@pytest.fixture
async def sink() -> AsyncIterator[MailServer]:
    async with run_mail_server() as server:
        yield server


@pytest.fixture
async def hook() -> AsyncIterator[WebhookRecorder]:
    async with run_webhook() as server:
        yield server


@pytest.fixture
async def timed(database_url: str) -> AsyncIterator[Database]:
    """Yield the database with a clock that the test controls."""
    async with Database.open(database_url, clock=ManualClock()) as db:
        yield db


@pytest.fixture
def logs() -> Iterator[Logs]:
    with structlog.testing.capture_logs() as entries:
        yield entries


def section(sink: MailServer | None = None, *hooks: WebhookRecorder, **changes: Any) -> AlertsSection:
    webhooks = [{"url": hook.url} for hook in hooks]
    mail = None
    if sink is not None:
        mail = {"host": "127.0.0.1", "port": sink.port, "sender": "penstock@example.com", "to": ["ops@example.com"]}
        mail |= changes
    return AlertsSection.model_validate({"email": mail, "webhooks": webhooks})


async def raise_test_alert(
    db: Database, message: str = "It failed.", severity: AlertSeverity = AlertSeverity.ERROR
) -> None:
    async with db.transaction() as tx:
        await raise_alert(tx, FEED, None, AlertCode.CONSOLIDATION_FAILED, severity, message, db.clock.now())


async def read_alert(db: Database) -> asyncpg.Record:
    row = await db.fetchrow("SELECT * FROM harvest_alert")
    assert row is not None
    return row


def advance(db: Database, by: timedelta = LONG) -> None:
    assert isinstance(db.clock, ManualClock)
    db.clock.advance(by)


def logged_alerts(logs: Logs) -> list[Any]:
    return [entry for entry in logs if entry["event"] == "harvest_alert_raised"]


async def test_skipped_consolidation_is_delivered_by_all_channels(
    database_url: str, tmp_path: Path, sink: MailServer, hook: WebhookRecorder, logs: Logs
) -> None:
    """H12, H5: log, mail and webhook receive the same alert, each of them once."""
    async with harvest_stepper(database_url, tmp_path, records=40) as stepper:
        run_id = str(await stepper.plan_run())
        stepper.source.set_faults(Faults(rate_500=1.0))
        await stepper.drain(contract.WORK_ITEMS)
        alert_sender = AlertSender(stepper.db, section(sink, hook))
        for _ in range(2):
            assert await alert_sender.send_due() == 0  # all channels have accepted it
        row = await read_alert(stepper.db)
    assert (row["delivered_to"], row["is_settled"], row["error"]) == (["log", "email", "webhook 1"], True, None)
    assert (row["code"], str(row["run_id"])) == ("CONSOLIDATION_SKIPPED", run_id)
    (payload,) = hook.payloads
    assert (payload["code"], payload["severity"], payload["feed"], payload["runId"]) == (
        "CONSOLIDATION_SKIPPED",
        "ERROR",
        FEED,
        run_id,
    )
    assert "watermark NOT advanced" in payload["message"]
    assert hook.headers[0]["content-type"] == "application/json"
    (mail,) = sink.mails
    assert mail["Subject"] == f"[Penstock] ERROR: CONSOLIDATION_SKIPPED ({FEED})"
    assert (mail["From"], mail["To"]) == ("penstock@example.com", "ops@example.com")
    assert mail["Message-ID"] == f"<harvest-alert-{row['id']}@penstock>"
    assert payload["message"] in mail.get_content()
    assert run_id in mail.get_content()
    (entry,) = logged_alerts(logs)
    assert (entry["log_level"], entry["message"], entry["runId"]) == ("error", payload["message"], run_id)


async def test_refused_login_raises_an_alert(
    database_url: str, tmp_path: Path, hook: WebhookRecorder, logs: Logs
) -> None:
    """H12, H14: a response 401 fails the plan at once, and the alert does not contain the password."""
    options = LocalOptions(records=10, password="another")
    async with harvest_stepper(database_url, tmp_path, options=options) as stepper:
        nivoda = {"kind": "nivoda", "url": f"{stepper.source.url}/graphql", "username": "demo@example.com"}
        secret = tmp_path / "secret"
        secret.write_text(f"{SECRET}\n")
        source = {**nivoda, "password": f"file:{secret}"}
        async with harvest_stepper(database_url, tmp_path, records=0, source=source) as refused:
            run_id = await refused.plan_run()
            await AlertSender(refused.db, section(None, hook)).send_due()
            plan = await refused.db.fetchrow("SELECT state, error FROM harvest_plan WHERE run_id = $1", run_id)
    assert plan is not None
    assert plan["state"] == "failed"
    (payload,) = hook.payloads
    assert (payload["code"], payload["severity"], payload["runId"]) == ("PLAN_FAILED", "ERROR", str(run_id))
    assert "Watermark NOT advanced" in payload["message"]
    assert SECRET not in json.dumps(payload)
    assert SECRET not in repr(logs)


async def test_log_level_is_the_severity(timed: Database, logs: Logs) -> None:
    """H12: every alert is logged, with its severity as level."""
    await raise_test_alert(timed, severity=AlertSeverity.WARNING)
    assert await AlertSender(timed, section()).send_due() == 0
    assert [entry["log_level"] for entry in logged_alerts(logs)] == ["warning"]
    assert (await read_alert(timed))["delivered_to"] == ["log"]


async def test_only_the_failed_channel_is_retried(
    timed: Database, sink: MailServer, hook: WebhookRecorder, logs: Logs
) -> None:
    """H12: the failed channel is retried later; the other channels receive the alert once."""
    hook.status = 503
    await raise_test_alert(timed)
    alert_sender = AlertSender(timed, section(sink, hook))
    assert await alert_sender.send_due() == 1
    row = await read_alert(timed)
    assert (row["delivered_to"], row["attempts"], row["is_settled"]) == (["log", "email"], 1, False)
    assert row["error"].startswith("webhook 1: ClientResponseError: 503")
    hook.status = 200
    assert await alert_sender.send_due() == 1  # it is not due yet
    assert (hook.payloads, row["due_at"] > timed.clock.now()) == ([], True)
    advance(timed)
    assert await alert_sender.send_due() == 0
    row = await read_alert(timed)
    assert (row["delivered_to"], row["is_settled"], row["error"]) == (["log", "email", "webhook 1"], True, None)
    assert (len(sink.mails), len(hook.payloads), len(logged_alerts(logs))) == (1, 1, 1)


async def test_delivery_ends_after_the_last_attempt(timed: Database, sink: MailServer, hook: WebhookRecorder) -> None:
    """H12: after the last attempt the alert has its channels and its error."""
    sink.fails = True
    await raise_test_alert(timed)
    alert_sender = AlertSender(timed, section(sink, hook))
    for attempt in range(1, ATTEMPTS + 1):
        assert not (await read_alert(timed))["is_settled"]
        assert await alert_sender.send_due() == (attempt < ATTEMPTS)
        advance(timed)
    assert await alert_sender.send_due() == 0
    row = await read_alert(timed)
    assert (row["delivered_to"], row["attempts"], row["is_settled"]) == (["log", "webhook 1"], ATTEMPTS, True)
    assert "451" in row["error"]
    assert len(hook.payloads) == 1


async def test_redirect_is_not_followed(timed: Database, hook: WebhookRecorder) -> None:
    """H12: an alert and its secrets are sent only to the configured URL."""
    hook.status = 307
    await raise_test_alert(timed)
    await AlertSender(timed, section(None, hook)).send_due()
    row = await read_alert(timed)
    assert row["delivered_to"] == ["log"]
    # The URL may be a secret, so the error contains only the response.
    assert "307" in row["error"]
    assert hook.url not in row["error"]


async def test_unreachable_channel_does_not_affect_others(timed: Database, hook: WebhookRecorder) -> None:
    """H12: the other channels receive the alert if a host does not respond or does not exist."""
    mail = {"host": "nowhere.invalid", "sender": "a@example.com", "to": ["b@example.com"]}
    channels = {"email": mail, "webhooks": [{"url": "http://127.0.0.1:1/"}, {"url": hook.url}]}
    await raise_test_alert(timed)
    await AlertSender(timed, AlertsSection.model_validate(channels)).send_due()
    row = await read_alert(timed)
    assert (row["delivered_to"], row["is_settled"]) == (["log", "webhook 2"], False)


async def test_login_at_the_mail_server(timed: Database, logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    """H12: the password is read from its reference; the error of a wrong login does not contain it."""
    monkeypatch.setenv("MAIL_PASSWORD", SECRET)
    async with run_mail_server(user="penstock") as sink:
        await raise_test_alert(timed)
        login = {"username": "penstock", "password": "env:MAIL_PASSWORD"}
        await AlertSender(timed, section(sink, **login)).send_due()
        assert (len(sink.mails), sink.logins) == (1, [f"\0penstock\0{SECRET}"])
        await timed.execute("DELETE FROM harvest_alert")
        await raise_test_alert(timed)
        await AlertSender(timed, section(sink, **{**login, "username": "wrong"})).send_due()
        row = await read_alert(timed)
        assert (len(sink.mails), row["delivered_to"]) == (1, ["log"])
    assert "535" in row["error"]
    encoded = base64.b64encode(f"\0wrong\0{SECRET}".encode()).decode()
    for text in (row["error"], repr(logs)):
        assert SECRET not in text
        assert encoded not in text


async def test_secret_headers_are_sent_and_never_shown(
    timed: Database, hook: WebhookRecorder, logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H12: the webhook receives its secret; the log and the alert do not contain it, even after a failure."""
    monkeypatch.setenv("HOOK_TOKEN", f"Bearer {SECRET}")
    channels = {"webhooks": [{"url": hook.url, "secret_headers": {"Authorization": "env:HOOK_TOKEN"}}]}
    hook.status = 500
    await raise_test_alert(timed)
    alert_sender = AlertSender(timed, AlertsSection.model_validate(channels))
    await alert_sender.send_due()
    assert hook.headers[0]["authorization"] == f"Bearer {SECRET}"
    assert SECRET not in (await read_alert(timed))["error"]
    assert SECRET not in repr(logs)
    assert SECRET not in repr(AlertsSection.model_validate(channels))


@pytest.mark.parametrize("password", ["päss-wörd", "line\nbreak"])
async def test_invalid_secret_does_not_affect_other_channels(
    timed: Database, hook: WebhookRecorder, logs: Logs, monkeypatch: pytest.MonkeyPatch, password: str
) -> None:
    """H12: a secret that cannot be sent is a failure of its channel, which is counted and given up in the end."""
    monkeypatch.setenv("ODD_SECRET", password)
    async with run_mail_server(user="penstock") as sink:
        mail = {"host": "127.0.0.1", "port": sink.port, "sender": "a@example.com", "to": ["b@example.com"]}
        odd = {"url": hook.url, "secret_headers": {"X-Token": "env:ODD_SECRET"}}
        channels = {
            "email": {**mail, "username": "penstock", "password": "env:ODD_SECRET"},
            "webhooks": [odd, {"url": hook.url}],
        }
        await raise_test_alert(timed)
        await AlertSender(timed, AlertsSection.model_validate(channels)).send_due()
        row = await read_alert(timed)
    assert {"log", "webhook 2"} <= set(row["delivered_to"])
    assert "email" not in row["delivered_to"]
    assert (row["attempts"], len(logged_alerts(logs))) == (1, 1)
    assert password not in row["error"] + repr(logs)


async def test_missing_secret_is_an_error_at_the_start(timed: Database) -> None:
    """H12: the error names the setting, before any alert is raised."""
    with pytest.raises(BadConfig, match=r"harvest\.alerts\.email\.password refers to env:NO_SUCH"):
        AlertSender(timed, section(MailServer(port=1), username="x", password="env:NO_SUCH"))


async def test_concurrent_senders_deliver_an_alert_once(timed: Database, hook: WebhookRecorder) -> None:
    """H12: a sender locks its alert, and other processes skip it."""
    for number in range(4):
        await raise_test_alert(timed, f"number {number}")
    alert_senders = [AlertSender(timed, section(None, hook)) for _ in range(3)]
    await asyncio.gather(*(alert_sender.send_due() for alert_sender in alert_senders))
    assert sorted(payload["message"] for payload in hook.payloads) == [f"number {number}" for number in range(4)]


async def test_any_text_is_delivered(timed: Database, sink: MailServer, hook: WebhookRecorder) -> None:
    """H12: every channel delivers line breaks, long lines and any character of an error."""
    message = make_storable("täglich \N{BLACK DIAMOND SUIT}\r\nSubject: another\n.\n" + "x" * 5_000, 10_000)
    await raise_test_alert(timed, message)
    await AlertSender(timed, section(sink, hook)).send_due()
    assert (await read_alert(timed))["is_settled"]
    assert hook.payloads[0]["message"] == message
    (mail,) = sink.mails
    assert mail["Subject"] == f"[Penstock] ERROR: CONSOLIDATION_FAILED ({FEED})"
    assert "x" * 5_000 in mail.get_content()


async def test_alert_of_a_rolled_back_transaction_is_not_delivered(timed: Database, hook: WebhookRecorder) -> None:
    """H12: an alert is part of the transaction of its cause."""

    async def roll_back() -> None:
        async with timed.transaction() as tx:
            await raise_alert(tx, FEED, None, AlertCode.RUN_FORCED, AlertSeverity.WARNING, "no", timed.clock.now())
            raise LookupError

    with pytest.raises(LookupError):
        await roll_back()
    assert await AlertSender(timed, section(None, hook)).send_due() == 0
    assert hook.payloads == []
