"""Who is told of a publication: dictionaries and flows exactly once, webhooks at least once."""

import hashlib
import hmac
import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from penstock.ingest.config import AlertSection
from penstock.ingest.model import IngestAlert
from penstock.ingest.state.supplier_status import standing
from penstock.ingest.tree import paths
from penstock.kernel.clock import ManualClock
from tests.ingest.deliver.receivers import FLOW, ONE, TWO, Deliver, Dictionary, WebhookServer, payloads, started
from tests.ingest.harness import KEYED, SUPPLIER, IngestHarness, aim, clock_of_today
from tests.support.processes import Up, penstock

SECRET = "hush, hush"


@pytest.fixture
def clock() -> ManualClock:
    return clock_of_today()


def markers(harness: IngestHarness) -> list[Path]:
    return sorted((harness.root / paths.run(harness.current() or "", "deliveries")).glob("*.json"))


def alerts(harness: IngestHarness, clock: ManualClock) -> list[IngestAlert]:
    return standing(harness.tree, SUPPLIER, AlertSection(), clock.now()).alerts


def test_a_webhook_is_told_once_of_each_publication(
    harness: IngestHarness, deliver: Deliver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I23: a note of the current state, signed; the next publication has another key."""
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    with WebhookServer() as hook:
        aim(harness, {"webhook": {"url": hook.url, "secret": "env:HOOK_SECRET"}})
        assert deliver() == {}  # nothing is published yet
        run_id = harness.publish(ONE)
        assert deliver() == {f"webhook {hook.url}": "done"}
        assert deliver() == {}
        harness.publish(TWO)
        assert deliver() == {f"webhook {hook.url}": "done"}
    first, second = hook.calls
    note = json.loads(first.body)
    pointer = harness.told(paths.state(SUPPLIER, run_id, paths.POINTER))
    changes = {"previous": None, "added": 2, "removed": 0, "changed": 0, "unchanged": 0}
    assert note == {"event": "ingest.published", "supplier": SUPPLIER, **pointer, "facts": 2, "changes": changes}
    signature = hmac.new(SECRET.encode(), first.body, hashlib.sha256).hexdigest()
    assert first.headers["x-penstock-signature"] == f"sha256={signature}"
    assert first.headers["idempotency-key"].startswith(run_id)
    assert first.headers["idempotency-key"] != second.headers["idempotency-key"]
    assert SECRET.encode() not in b"".join(harness.all_files().values())


def test_a_repetition_has_the_same_key(harness: IngestHarness, deliver: Deliver) -> None:
    """I23: at least once: who dies before he notes that he has told tells again, and it can be seen."""
    with WebhookServer() as hook:
        aim(harness, {"webhook": {"url": hook.url}})
        harness.publish(ONE)
        deliver()
        (marker,) = markers(harness)
        marker.unlink()
        deliver()
    first, second = hook.calls
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert first.body == second.body
    assert "x-penstock-signature" not in first.headers


def test_what_fails_is_tried_again_ever_more_seldom(
    harness: IngestHarness, clock: ManualClock, deliver: Deliver
) -> None:
    """I23: each pause is longer, up to an hour, and half of it chance; `status` tells it until it works."""
    failures = 12
    with WebhookServer(*[500] * failures) as hook:
        aim(harness, {"webhook": {"url": hook.url}})
        harness.publish(ONE)
        pauses = []
        for _ in range(failures):
            assert deliver() == {f"webhook {hook.url}": f"not yet: {hook.url} answered 500"}
            assert alerts(harness, clock) == [IngestAlert.UNDELIVERED]
            told = json.loads(markers(harness)[0].read_bytes())
            pauses.append(_seconds(told["again_at"], clock))
            clock.advance(timedelta(seconds=pauses[-1] - 0.5))
            assert deliver() == {}
            clock.advance(timedelta(seconds=1))
        assert len(hook.calls) == failures
        longest = [min(5 * 2**attempt, 3600) for attempt in range(failures)]
        assert all(most / 2 <= pause <= most for pause, most in zip(pauses, longest, strict=True)), pauses
        assert pauses != pytest.approx(longest)
        assert deliver() == {f"webhook {hook.url}": "done"}
    assert alerts(harness, clock) == []
    assert len({call.headers["idempotency-key"] for call in hook.calls}) == 1


def _seconds(then: str, clock: ManualClock) -> float:
    return (datetime.fromisoformat(then) - clock.now()).total_seconds()


def test_an_address_that_is_down_and_a_secret_that_is_missing(
    harness: IngestHarness, clock: ManualClock, deliver: Deliver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I23: both are told and tried again; one target does not hold up another."""
    monkeypatch.delenv("HOOK_SECRET", raising=False)
    gone = "http://127.0.0.1:1/gone"
    with WebhookServer() as hook:
        aim(harness, {"webhook": {"url": gone}}, {"webhook": {"url": hook.url, "secret": "env:HOOK_SECRET"}})
        harness.publish(ONE)
        came = deliver()
        assert came[f"webhook {gone}"].startswith(f"not yet: {gone} does not answer")
        assert "HOOK_SECRET" in came[f"webhook {hook.url}"]
        undelivered = standing(harness.tree, SUPPLIER, AlertSection(), clock.now()).undelivered
        assert len(undelivered) == 2
        assert f"webhook {gone}: WEBHOOK_DOWN" in undelivered
        assert hook.calls == []
        monkeypatch.setenv("HOOK_SECRET", SECRET)
        clock.advance(timedelta(seconds=6))
        assert deliver()[f"webhook {hook.url}"] == "done"
        assert len(hook.calls) == 1


def test_only_the_current_state_is_told(harness: IngestHarness, clock: ManualClock, deliver: Deliver) -> None:
    """I23: what could not be told of an older state is not told any more."""
    with WebhookServer(500) as hook:
        aim(harness, {"webhook": {"url": hook.url}})
        harness.publish(ONE)
        deliver()
        second = harness.publish(TWO)
        clock.advance(timedelta(days=1))
        assert deliver() == {f"webhook {hook.url}": "done"}
        assert deliver() == {}
    assert [json.loads(call.body)["fence"] for call in hook.calls] == [1, 2]
    assert json.loads(hook.calls[1].body)["run_id"] == second


def test_delivered_exactly_once(harness: IngestHarness, dictionary: Dictionary, deliver: Deliver) -> None:
    """I23: killed between the delivery and its marker, it is delivered again, and nothing changes."""
    aim(harness, dictionary.aim)
    harness.publish(ONE)
    deliver()
    (marker,) = markers(harness)
    told = json.loads(marker.read_bytes())["told"]
    marker.unlink()
    assert deliver() == {dictionary.name: "done"}
    assert json.loads(marker.read_bytes())["told"] == told
    assert [version["version"] for version in dictionary.versions] == [1]


@pytest.mark.full
def test_a_dictionary_that_is_not_there_yet(
    harness: IngestHarness, dictionary: Dictionary, clock: ManualClock, deliver: Deliver
) -> None:
    """I23: somebody has to mend it: told, and tried again; likewise a state that was published without a key."""
    missing = {"dictionary": {**dictionary.aim["dictionary"], "code": "NOT_YET"}}
    harness.configure({name: value for name, value in KEYED.items() if name != "key"})
    harness.publish(ONE)
    aim(harness, missing, dictionary.aim)
    came = deliver()
    assert all(how.startswith("not yet: ") for how in came.values())
    assert len(came) == 2
    assert alerts(harness, clock) == [IngestAlert.UNDELIVERED]
    harness.publish(TWO)
    came = deliver()
    assert came[dictionary.name] == "done"
    assert "NOT_YET" in came[dictionary.name.replace("PRICES", "NOT_YET")]


def test_a_publication_starts_a_flow_once(harness: IngestHarness, up: Up, deliver: Deliver) -> None:
    """I23: killed before its marker, it is started again and is the same run, whatever `scope` says now."""
    flow = {"name": FLOW, "url": up.api}
    aim(harness, {"flow": {**flow, "scope": {"note": "fresh prices"}}})
    first = harness.publish(ONE)
    assert deliver() == {f"flow {FLOW} at {up.api}": "done"}
    (marker,) = markers(harness)
    told = json.loads(marker.read_bytes())["told"]
    marker.unlink()
    assert deliver() == {f"flow {FLOW} at {up.api}": "done"}
    assert json.loads(marker.read_bytes())["told"] == told
    marker.unlink()
    aim(harness, {"flow": {**flow, "scope": {"note": "another"}}})
    assert deliver() == {f"flow {FLOW} at {up.api}": "done"}
    (run,) = started(up, first)
    assert run["runId"] == told["run_id"]
    assert run["scope"] == {"note": "fresh prices", "supplier": SUPPLIER, "runId": first, "fence": 1, "facts": 2}
    second = harness.publish(TWO)
    assert deliver() == {f"flow {FLOW} at {up.api}": "done"}
    assert [run["scope"]["fence"] for run in started(up, second)] == [2]


def test_a_flow_that_is_not_there_yet(harness: IngestHarness, up: Up, clock: ManualClock, deliver: Deliver) -> None:
    """I23: somebody has to mend it: told, and tried again; the publication stands."""
    aim(harness, {"flow": {"name": "not-yet", "url": up.api}})
    run_id = harness.publish(ONE)
    (came,) = deliver().values()
    assert came.startswith("not yet: ")
    assert "not-yet" in came
    assert harness.current() == run_id
    assert alerts(harness, clock) == [IngestAlert.UNDELIVERED]


@pytest.mark.full
def test_the_command_tells_of_its_deliveries(harness: IngestHarness, dictionary: Dictionary) -> None:
    """I23: `ingest run` delivers what it publishes; what is away does not make the run fail."""
    aim(harness, dictionary.aim, {"webhook": {"url": "http://127.0.0.1:1/gone"}})
    harness.drop(ONE)
    done = penstock("ingest", "run", SUPPLIER, "--root", str(harness.root), cwd=harness.root)
    assert done.code == 0
    assert f"delivery to {dictionary.name}: done\n" in done.out
    assert "delivery to webhook http://127.0.0.1:1/gone: not yet: " in done.out
    dictionary.shows(payloads(harness))
