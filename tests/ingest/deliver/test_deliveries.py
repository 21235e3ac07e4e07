"""Deliveries of the published state: dictionaries and flows exactly once, webhooks at least once."""

import hashlib
import hmac
import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from penstock.ingest.config import AlertSection
from penstock.ingest.model import IngestAlert
from penstock.ingest.state.supplier_status import read_supplier_status
from penstock.ingest.tree import paths
from penstock.kernel.clock import ManualClock
from tests.ingest.deliver.receivers import (
    FLOW,
    ONE,
    TWO,
    Deliver,
    Dictionary,
    WebhookServer,
    list_started,
    read_payloads,
    statuses,
)
from tests.ingest.harness import KEYED, SUPPLIER, IngestHarness, make_clock, set_targets
from tests.support.processes import Up, penstock

SECRET = "hush, hush"


@pytest.fixture
def clock() -> ManualClock:
    return make_clock()


def find_markers(harness: IngestHarness) -> list[Path]:
    return sorted((harness.root / paths.make_run_path(harness.current() or "", "deliveries")).glob("*.json"))


def list_alerts(harness: IngestHarness, clock: ManualClock) -> list[IngestAlert]:
    return read_supplier_status(harness.tree, SUPPLIER, AlertSection(), clock.now()).alerts


def test_webhook_gets_one_message_per_publication(
    harness: IngestHarness, deliver: Deliver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I23: the message describes the published state and is signed; the next publication has another key."""
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    with WebhookServer() as hook:
        set_targets(harness, {"webhook": {"url": hook.url, "secret": "env:HOOK_SECRET"}})
        assert deliver() == {}  # nothing is published yet
        run_id = harness.publish(ONE)
        assert statuses(deliver()) == {f"webhook {hook.url}": "DELIVERED"}
        assert deliver() == {}
        harness.publish(TWO)
        assert statuses(deliver()) == {f"webhook {hook.url}": "DELIVERED"}
    first, second = hook.calls
    message = json.loads(first.body)
    pointer = harness.read_json(paths.make_state_path(SUPPLIER, run_id, paths.POINTER))
    changes = {"previous": None, "added": 2, "removed": 0, "changed": 0, "unchanged": 0}
    state = {"runId": run_id, "sha256": pointer["sha256"], "fence": 1, "publishedAt": pointer["published_at"]}
    assert message == {"event": "ingest.published", "supplier": SUPPLIER, **state, "facts": 2, "changes": changes}
    assert message["publishedAt"].endswith("Z")
    signature = hmac.new(SECRET.encode(), first.body, hashlib.sha256).hexdigest()
    assert first.headers["x-penstock-signature"] == f"sha256={signature}"
    assert first.headers["idempotency-key"].startswith(run_id)
    assert first.headers["idempotency-key"] != second.headers["idempotency-key"]
    assert SECRET.encode() not in b"".join(harness.all_files().values())


def test_repetition_has_the_same_key(harness: IngestHarness, deliver: Deliver) -> None:
    """I23: a delivery that is repeated after a crash has the same key, so that the receiver recognizes it."""
    with WebhookServer() as hook:
        set_targets(harness, {"webhook": {"url": hook.url}})
        harness.publish(ONE)
        deliver()
        (marker,) = find_markers(harness)
        marker.unlink()
        deliver()
    first, second = hook.calls
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert first.body == second.body
    assert "x-penstock-signature" not in first.headers


def test_failed_delivery_is_retried_with_growing_pauses(
    harness: IngestHarness, clock: ManualClock, deliver: Deliver
) -> None:
    """I23: the pauses double up to an hour, with jitter; the alert is active until the delivery succeeds."""
    failures = 12
    with WebhookServer(*[500] * failures) as hook:
        set_targets(harness, {"webhook": {"url": hook.url}})
        harness.publish(ONE)
        pauses = []
        for _ in range(failures):
            (result,) = deliver().values()
            assert (result.status, result.error) == ("PENDING", f"{hook.url} answered 500")
            assert list_alerts(harness, clock) == [IngestAlert.UNDELIVERED]
            delivery = json.loads(find_markers(harness)[0].read_bytes())
            assert result.retry_at == delivery["retry_at"]
            pauses.append(_seconds_until(delivery["retry_at"], clock))
            clock.advance(timedelta(seconds=pauses[-1] - 0.5))
            assert deliver() == {}
            clock.advance(timedelta(seconds=1))
        assert len(hook.calls) == failures
        longest = [min(5 * 2**attempt, 3600) for attempt in range(failures)]
        assert all(most / 2 <= pause <= most for pause, most in zip(pauses, longest, strict=True)), pauses
        assert pauses != pytest.approx(longest)
        assert statuses(deliver()) == {f"webhook {hook.url}": "DELIVERED"}
    assert list_alerts(harness, clock) == []
    assert len({call.headers["idempotency-key"] for call in hook.calls}) == 1


def _seconds_until(then: str, clock: ManualClock) -> float:
    return (datetime.fromisoformat(then) - clock.now()).total_seconds()


def test_unreachable_webhook_and_missing_secret_are_retried(
    harness: IngestHarness, clock: ManualClock, deliver: Deliver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I23: each target is retried with its own error; one target does not delay another."""
    monkeypatch.delenv("HOOK_SECRET", raising=False)
    down = "http://127.0.0.1:1/hook"
    with WebhookServer() as hook:
        set_targets(harness, {"webhook": {"url": down}}, {"webhook": {"url": hook.url, "secret": "env:HOOK_SECRET"}})
        harness.publish(ONE)
        results = deliver()
        assert f"{down} does not answer" in str(results[f"webhook {down}"])
        assert "HOOK_SECRET" in str(results[f"webhook {hook.url}"])
        undelivered = read_supplier_status(harness.tree, SUPPLIER, AlertSection(), clock.now()).undelivered
        assert len(undelivered) == 2
        assert f"webhook {down}: WEBHOOK_DOWN" in undelivered
        assert hook.calls == []
        monkeypatch.setenv("HOOK_SECRET", SECRET)
        clock.advance(timedelta(seconds=6))
        assert statuses(deliver())[f"webhook {hook.url}"] == "DELIVERED"
        assert len(hook.calls) == 1


def test_only_the_published_state_is_delivered(harness: IngestHarness, clock: ManualClock, deliver: Deliver) -> None:
    """I23: a delivery that failed is not repeated after another state is published."""
    with WebhookServer(500) as hook:
        set_targets(harness, {"webhook": {"url": hook.url}})
        harness.publish(ONE)
        deliver()
        second = harness.publish(TWO)
        clock.advance(timedelta(days=1))
        assert statuses(deliver()) == {f"webhook {hook.url}": "DELIVERED"}
        assert deliver() == {}
    assert [json.loads(call.body)["fence"] for call in hook.calls] == [1, 2]
    assert json.loads(hook.calls[1].body)["runId"] == second


def test_dictionary_gets_a_state_exactly_once(harness: IngestHarness, dictionary: Dictionary, deliver: Deliver) -> None:
    """I23: a delivery that is repeated because its marker was not written changes nothing."""
    set_targets(harness, dictionary.target)
    harness.publish(ONE)
    deliver()
    (marker,) = find_markers(harness)
    result = json.loads(marker.read_bytes())["result"]
    marker.unlink()
    assert statuses(deliver()) == {dictionary.name: "DELIVERED"}
    assert json.loads(marker.read_bytes())["result"] == result
    assert [version["version"] for version in dictionary.versions] == [1]


@pytest.mark.full
def test_missing_dictionary_is_retried(
    harness: IngestHarness, dictionary: Dictionary, clock: ManualClock, deliver: Deliver
) -> None:
    """I23: the delivery to a missing dictionary is retried, and so is that of a state without a key."""
    missing = {"dictionary": {**dictionary.target["dictionary"], "code": "NOT_YET"}}
    harness.configure({name: value for name, value in KEYED.items() if name != "key"})
    harness.publish(ONE)
    set_targets(harness, missing, dictionary.target)
    assert [*statuses(deliver()).values()] == ["PENDING", "PENDING"]
    assert list_alerts(harness, clock) == [IngestAlert.UNDELIVERED]
    harness.publish(TWO)
    results = deliver()
    assert statuses(results)[dictionary.name] == "DELIVERED"
    assert "NOT_YET" in str(results[dictionary.name.replace("PRICES", "NOT_YET")])


def test_publication_starts_a_flow_once(harness: IngestHarness, up: Up, deliver: Deliver) -> None:
    """I23: a start that is repeated because its marker was not written finds the same run, even with another scope."""
    flow = {"name": FLOW, "url": up.api}
    set_targets(harness, {"flow": {**flow, "scope": {"note": "fresh prices"}}})
    first = harness.publish(ONE)
    assert statuses(deliver()) == {f"flow {FLOW} at {up.api}": "DELIVERED"}
    (marker,) = find_markers(harness)
    result = json.loads(marker.read_bytes())["result"]
    marker.unlink()
    assert statuses(deliver()) == {f"flow {FLOW} at {up.api}": "DELIVERED"}
    assert json.loads(marker.read_bytes())["result"] == result
    marker.unlink()
    set_targets(harness, {"flow": {**flow, "scope": {"note": "another"}}})
    assert statuses(deliver()) == {f"flow {FLOW} at {up.api}": "DELIVERED"}
    (run,) = list_started(up, first)
    assert run["runId"] == result["run_id"]
    assert run["scope"] == {"note": "fresh prices", "supplier": SUPPLIER, "runId": first, "fence": 1, "facts": 2}
    second = harness.publish(TWO)
    assert statuses(deliver()) == {f"flow {FLOW} at {up.api}": "DELIVERED"}
    assert [run["scope"]["fence"] for run in list_started(up, second)] == [2]


def test_missing_flow_is_retried(harness: IngestHarness, up: Up, clock: ManualClock, deliver: Deliver) -> None:
    """I23: the start of a missing flow is retried; the state stays published."""
    set_targets(harness, {"flow": {"name": "not-yet", "url": up.api}})
    run_id = harness.publish(ONE)
    (result,) = deliver().values()
    assert result.status == "PENDING"
    assert "not-yet" in str(result)
    assert harness.current() == run_id
    assert list_alerts(harness, clock) == [IngestAlert.UNDELIVERED]


@pytest.mark.full
def test_command_prints_its_deliveries(harness: IngestHarness, dictionary: Dictionary) -> None:
    """I23: `ingest run` delivers the state and prints the results; a failed delivery does not fail the run."""
    set_targets(harness, dictionary.target, {"webhook": {"url": "http://127.0.0.1:1/hook"}})
    harness.drop(ONE)
    result = penstock("ingest", "run", SUPPLIER, "--root", str(harness.root), cwd=harness.root)
    assert result.code == 0
    assert f"delivery to {dictionary.name}: delivered\n" in result.out
    assert "delivery to webhook http://127.0.0.1:1/hook: pending: " in result.out
    dictionary.wait_items(read_payloads(harness))
