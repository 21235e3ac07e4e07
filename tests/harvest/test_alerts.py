"""H12: alerts are told by log, e-mail and webhook: each channel once, and until it took them or was tried enough."""

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
    """A mail server that takes everything, unless it is told to fail."""

    user: str | None = None
    fails: bool = False
    port: int = 0
    mails: list[EmailMessage] = field(default_factory=list)
    logins: list[str] = field(default_factory=list)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def say(text: str) -> None:
            writer.write(f"{text}\r\n".encode())

        say("220 sink")
        while line := (await reader.readline()).decode().strip():
            word = line.split(" ")[0].upper()
            if word == "EHLO":
                say("250-sink")
                say("250 AUTH PLAIN" if self.user else "250 8BITMIME")
            elif word == "AUTH":
                self.logins.append(base64.b64decode(line.split(" ")[2]).decode())
                is_known = self.logins[-1] == f"\0{self.user}\0{SECRET}"
                say("235 ok" if is_known else "535 5.7.8 who are you")
            elif word == "MAIL" and (self.fails or (self.user and not self.logins)):
                say("451 not now")
            elif word == "DATA":
                say("354 go on")
                text = await reader.readuntil(b"\r\n.\r\n")
                self.mails.append(email.message_from_bytes(text[:-3], policy=email.policy.default))
                say("250 taken")
            elif word == "QUIT":
                say("221 bye")
                break
            else:
                say("250 ok")
            await writer.drain()
        writer.close()


@asynccontextmanager
async def mailing(**given: Any) -> AsyncIterator[MailServer]:
    sink = MailServer(**given)
    server = await asyncio.start_server(sink.talk, "127.0.0.1", 0)
    sink.port = server.sockets[0].getsockname()[1]
    try:
        yield sink
    finally:
        server.close()
        await server.wait_closed()


@dataclass
class WebhookRecorder:
    """A webhook that keeps what it is told."""

    status: int = 200
    url: str = ""
    told: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)

    async def take(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers)
        if self.status == 200:
            self.told.append(await request.json())
        return web.Response(status=self.status, headers={"Location": "/elsewhere"})


@asynccontextmanager
async def hooking() -> AsyncIterator[WebhookRecorder]:
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
    async with mailing() as one:
        yield one


@pytest.fixture
async def hook() -> AsyncIterator[WebhookRecorder]:
    async with hooking() as one:
        yield one


@pytest.fixture
async def timed(database_url: str) -> AsyncIterator[Database]:
    """The database, on a clock a test moves."""
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


async def cause(db: Database, message: str = "It failed.", severity: AlertSeverity = AlertSeverity.ERROR) -> None:
    async with db.transaction() as tx:
        await raise_alert(tx, FEED, None, AlertCode.CONSOLIDATION_FAILED, severity, message, db.clock.now())


async def alert(db: Database) -> asyncpg.Record:
    row = await db.fetchrow("SELECT * FROM harvest_alert")
    assert row is not None
    return row


def later(db: Database, by: timedelta = LONG) -> None:
    assert isinstance(db.clock, ManualClock)
    db.clock.advance(by)


def alerts_in(logs: Logs) -> list[Any]:
    return [entry for entry in logs if entry["event"] == "alert"]


async def test_a_skipped_consolidation_is_told_by_all_channels(
    database_url: str, tmp_path: Path, sink: MailServer, hook: WebhookRecorder, logs: Logs
) -> None:
    """H12, H5: log, mail and webhook say the same of the same run; none is told twice."""
    async with harvest_stepper(database_url, tmp_path, records=40) as turned:
        run_id = str(await turned.planned())
        turned.source.set_faults(Faults(rate_500=1.0))
        await turned.drain(contract.WORK_ITEMS)
        alert_sender = AlertSender(turned.db, section(sink, hook))
        for _ in range(2):
            assert await alert_sender.tell() == 0  # nobody has still to be told
        row = await alert(turned.db)
    assert (row["told"], row["is_told"], row["error"]) == (["log", "email", "webhook 1"], True, None)
    assert (row["code"], str(row["run_id"])) == ("CONSOLIDATION_SKIPPED", run_id)
    (told,) = hook.told
    assert (told["code"], told["severity"], told["feed"], told["runId"]) == (
        "CONSOLIDATION_SKIPPED",
        "ERROR",
        FEED,
        run_id,
    )
    assert "watermark NOT advanced" in told["message"]
    assert hook.headers[0]["content-type"] == "application/json"
    (mail,) = sink.mails
    assert mail["Subject"] == f"[Penstock] ERROR: CONSOLIDATION_SKIPPED ({FEED})"
    assert (mail["From"], mail["To"]) == ("penstock@example.com", "ops@example.com")
    assert mail["Message-ID"] == f"<harvest-alert-{row['id']}@penstock>"
    assert told["message"] in mail.get_content()
    assert run_id in mail.get_content()
    (entry,) = alerts_in(logs)
    assert (entry["log_level"], entry["message"], entry["runId"]) == ("error", told["message"], run_id)


async def test_a_source_that_refuses_is_told(
    database_url: str, tmp_path: Path, hook: WebhookRecorder, logs: Logs
) -> None:
    """H12, H14: 401 fails the plan at once, and the alert does not tell the password."""
    options = LocalOptions(records=10, password="another")
    async with harvest_stepper(database_url, tmp_path, options=options) as turned:
        nivoda = {"kind": "nivoda", "url": f"{turned.source.url}/graphql", "username": "demo@example.com"}
        secret = tmp_path / "secret"
        secret.write_text(f"{SECRET}\n")
        source = {**nivoda, "password": f"file:{secret}"}
        async with harvest_stepper(database_url, tmp_path, records=0, source=source) as refused:
            run_id = await refused.planned()
            await AlertSender(refused.db, section(None, hook)).tell()
            plan = await refused.db.fetchrow("SELECT state, error FROM harvest_plan WHERE run_id = $1", run_id)
    assert plan is not None
    assert plan["state"] == "failed"
    (told,) = hook.told
    assert (told["code"], told["severity"], told["runId"]) == ("PLAN_FAILED", "ERROR", str(run_id))
    assert "Watermark NOT advanced" in told["message"]
    assert SECRET not in json.dumps(told)
    assert SECRET not in repr(logs)


async def test_a_warning_is_logged_as_one(timed: Database, logs: Logs) -> None:
    """H12: the log is always told, in the alert's own severity."""
    await cause(timed, severity=AlertSeverity.WARNING)
    assert await AlertSender(timed, section()).tell() == 0
    assert [entry["log_level"] for entry in alerts_in(logs)] == ["warning"]
    assert (await alert(timed))["told"] == ["log"]


async def test_a_channel_that_fails_is_tried_again_and_the_others_are_not(
    timed: Database, sink: MailServer, hook: WebhookRecorder, logs: Logs
) -> None:
    """H12: later, and only the one that failed; what is told stays told."""
    hook.status = 503
    await cause(timed)
    alert_sender = AlertSender(timed, section(sink, hook))
    assert await alert_sender.tell() == 1
    row = await alert(timed)
    assert (row["told"], row["attempts"], row["is_told"]) == (["log", "email"], 1, False)
    assert row["error"].startswith("webhook 1: ClientResponseError: 503")
    hook.status = 200
    assert await alert_sender.tell() == 1  # not before its time
    assert (hook.told, row["due_at"] > timed.clock.now()) == ([], True)
    later(timed)
    assert await alert_sender.tell() == 0
    row = await alert(timed)
    assert (row["told"], row["is_told"], row["error"]) == (["log", "email", "webhook 1"], True, None)
    assert (len(sink.mails), len(hook.told), len(alerts_in(logs))) == (1, 1, 1)


async def test_a_channel_is_given_up_and_that_is_seen(timed: Database, sink: MailServer, hook: WebhookRecorder) -> None:
    """H12: after all its attempts nobody tries any more; the alert keeps whom it did not reach, and why."""
    sink.fails = True
    await cause(timed)
    alert_sender = AlertSender(timed, section(sink, hook))
    for attempt in range(1, ATTEMPTS + 1):
        assert not (await alert(timed))["is_told"]
        assert await alert_sender.tell() == (attempt < ATTEMPTS)
        later(timed)
    assert await alert_sender.tell() == 0
    row = await alert(timed)
    assert (row["told"], row["attempts"], row["is_told"]) == (["log", "webhook 1"], ATTEMPTS, True)
    assert "451" in row["error"]
    assert len(hook.told) == 1


async def test_a_redirect_is_no_success(timed: Database, hook: WebhookRecorder) -> None:
    """H12: an alert, and the secrets sent with it, go where they were meant to go or nowhere."""
    hook.status = 307
    await cause(timed)
    await AlertSender(timed, section(None, hook)).tell()
    row = await alert(timed)
    assert row["told"] == ["log"]
    # The address itself may be the secret: the error tells the answer, not where it came from.
    assert "307" in row["error"]
    assert hook.url not in row["error"]


async def test_a_channel_that_is_not_there(timed: Database, hook: WebhookRecorder) -> None:
    """H12: a host that does not answer or does not exist keeps no other channel from being told."""
    mail = {"host": "nowhere.invalid", "sender": "a@example.com", "to": ["b@example.com"]}
    given = {"email": mail, "webhooks": [{"url": "http://127.0.0.1:1/"}, {"url": hook.url}]}
    await cause(timed)
    await AlertSender(timed, AlertsSection.model_validate(given)).tell()
    row = await alert(timed)
    assert (row["told"], row["is_told"]) == (["log", "webhook 2"], False)


async def test_a_mail_server_that_wants_a_login(timed: Database, logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    """H12: the password comes from its reference; a wrong one is a failure that does not tell it."""
    monkeypatch.setenv("MAIL_PASSWORD", SECRET)
    async with mailing(user="penstock") as sink:
        await cause(timed)
        known = {"username": "penstock", "password": "env:MAIL_PASSWORD"}
        await AlertSender(timed, section(sink, **known)).tell()
        assert (len(sink.mails), sink.logins) == (1, [f"\0penstock\0{SECRET}"])
        await timed.execute("DELETE FROM harvest_alert")
        await cause(timed)
        await AlertSender(timed, section(sink, **{**known, "username": "somebody"})).tell()
        row = await alert(timed)
        assert (len(sink.mails), row["told"]) == (1, ["log"])
    assert "535" in row["error"]
    encoded = base64.b64encode(f"\0somebody\0{SECRET}".encode()).decode()
    for text in (row["error"], repr(logs)):
        assert SECRET not in text
        assert encoded not in text


async def test_secret_headers_are_sent_and_never_told(
    timed: Database, hook: WebhookRecorder, logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H12: a webhook gets its secret; neither the log nor the alert does, not even when it fails."""
    monkeypatch.setenv("HOOK_TOKEN", f"Bearer {SECRET}")
    given = {"webhooks": [{"url": hook.url, "secret_headers": {"Authorization": "env:HOOK_TOKEN"}}]}
    hook.status = 500
    await cause(timed)
    alert_sender = AlertSender(timed, AlertsSection.model_validate(given))
    await alert_sender.tell()
    assert hook.headers[0]["authorization"] == f"Bearer {SECRET}"
    assert SECRET not in (await alert(timed))["error"]
    assert SECRET not in repr(logs)
    assert SECRET not in repr(AlertsSection.model_validate(given))


@pytest.mark.parametrize("password", ["päss-wörd", "line\nbreak"])
async def test_a_secret_that_cannot_be_sent_keeps_nobody_else_from_being_told(
    timed: Database, hook: WebhookRecorder, logs: Logs, monkeypatch: pytest.MonkeyPatch, password: str
) -> None:
    """H12: whatever is wrong with a channel is that channel's failure: it is counted, and given up in the end."""
    monkeypatch.setenv("ODD_SECRET", password)
    async with mailing(user="penstock") as sink:
        mail = {"host": "127.0.0.1", "port": sink.port, "sender": "a@example.com", "to": ["b@example.com"]}
        odd = {"url": hook.url, "secret_headers": {"X-Token": "env:ODD_SECRET"}}
        given = {
            "email": {**mail, "username": "penstock", "password": "env:ODD_SECRET"},
            "webhooks": [odd, {"url": hook.url}],
        }
        await cause(timed)
        await AlertSender(timed, AlertsSection.model_validate(given)).tell()
        row = await alert(timed)
    assert {"log", "webhook 2"} <= set(row["told"])
    assert "email" not in row["told"]
    assert (row["attempts"], len(alerts_in(logs))) == (1, 1)
    assert password not in row["error"] + repr(logs)


async def test_a_secret_that_is_not_there_is_said_at_the_start(timed: Database) -> None:
    """H12: before anything has to be told."""
    with pytest.raises(BadConfig, match=r"harvest\.alerts\.email\.password refers to env:NO_SUCH"):
        AlertSender(timed, section(MailServer(port=1), username="x", password="env:NO_SUCH"))


async def test_two_who_tell_do_not_tell_twice(timed: Database, hook: WebhookRecorder) -> None:
    """H12: an alert is held by who tells it; another process goes past it."""
    for number in range(4):
        await cause(timed, f"number {number}")
    alert_senders = [AlertSender(timed, section(None, hook)) for _ in range(3)]
    await asyncio.gather(*(alert_sender.tell() for alert_sender in alert_senders))
    assert sorted(told["message"] for told in hook.told) == [f"number {number}" for number in range(4)]


async def test_odd_text_is_told(timed: Database, sink: MailServer, hook: WebhookRecorder) -> None:
    """H12: line breaks, long lines and any character of a source's error go through every channel."""
    message = make_storable("täglich \N{BLACK DIAMOND SUIT}\r\nSubject: another\n.\n" + "x" * 5_000, 10_000)
    await cause(timed, message)
    await AlertSender(timed, section(sink, hook)).tell()
    assert (await alert(timed))["is_told"]
    assert hook.told[0]["message"] == message
    (mail,) = sink.mails
    assert mail["Subject"] == f"[Penstock] ERROR: CONSOLIDATION_FAILED ({FEED})"
    assert "x" * 5_000 in mail.get_content()


async def test_what_is_not_committed_is_not_told(timed: Database, hook: WebhookRecorder) -> None:
    """H12: an alert is part of the transaction that gives cause for it."""

    async def undone() -> None:
        async with timed.transaction() as tx:
            await raise_alert(tx, FEED, None, AlertCode.RUN_FORCED, AlertSeverity.WARNING, "no", timed.clock.now())
            raise LookupError

    with pytest.raises(LookupError):
        await undone()
    assert await AlertSender(timed, section(None, hook)).tell() == 0
    assert hook.told == []
