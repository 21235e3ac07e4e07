"""The kinds of targets: dictionaries, flows and webhooks."""

from contextlib import closing

import pytest

from penstock.ingest.deliver import targets
from penstock.ingest.state.reader import open_state
from penstock.ingest.supplier import DictionaryTarget
from penstock.ingest.tree.async_bridge import AsyncBridge
from penstock.kernel.errors import PenstockError
from penstock.refdata import contract
from tests.ingest.deliver.receivers import (
    FLOW,
    ONE,
    OTHER_FLOW,
    TWO,
    Deliver,
    Dictionary,
    WebhookServer,
    list_started,
    read_payloads,
    statuses,
)
from tests.ingest.harness import KEYED, SUPPLIER, IngestHarness, set_targets, snapshot
from tests.support.processes import Up


def test_redirects_are_not_followed(harness: IngestHarness, deliver: Deliver) -> None:
    """I23: a message that is signed for one address is not sent to another."""
    with WebhookServer(302, 307) as hook:
        set_targets(harness, {"webhook": {"url": hook.url}})
        harness.publish(ONE)
        (result,) = deliver().values()
        assert (result.status, result.error) == ("PENDING", f"{hook.url} answered 302")
    assert [call.path for call in hook.calls] == ["/hook"]


def test_dictionary_gets_the_published_facts(harness: IngestHarness, dictionary: Dictionary, deliver: Deliver) -> None:
    """I23: a pod serves the facts by their key; facts that are missing in the file are deleted."""
    set_targets(harness, dictionary.target)
    harness.publish(snapshot({"A": 1, "B": 2, "C": 3}))
    assert statuses(deliver()) == {dictionary.name: "DELIVERED"}
    dictionary.wait_items(read_payloads(harness))
    harness.publish(snapshot({"B": 7, "D": 4}))
    assert statuses(deliver()) == {dictionary.name: "DELIVERED"}
    dictionary.wait_items({"B": {"price": 7, "sku": "B"}, "D": {"price": 4, "sku": "D"}})
    assert [version["version"] for version in dictionary.versions] == [2, 1]


def test_late_delivery_is_refused(harness: IngestHarness, dictionary: Dictionary, deliver: Deliver) -> None:
    """I23: a process that was paused for hours cannot restore an older state."""
    set_targets(harness, dictionary.target)
    harness.publish(ONE)
    target = DictionaryTarget.model_validate(dictionary.target["dictionary"])
    with open_state(harness.tree, SUPPLIER) as old, closing(AsyncBridge()) as bridge:
        harness.publish(TWO)
        deliver()
        with pytest.raises(PenstockError) as refused:
            bridge.call(targets.fill_dictionary(target, "sku", old))
    assert isinstance(refused.value, targets.DeliveryRefused)
    dictionary.wait_items(read_payloads(harness))
    assert [version["version"] for version in dictionary.versions] == [1]


def test_large_state_is_sent_in_several_chunks(
    harness: IngestHarness, dictionary: Dictionary, deliver: Deliver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I23: a state in many commands is one version; an empty state is one command."""
    monkeypatch.setattr(contract, "_ITEMS_LIMIT", 1_000)
    harness.configure({**KEYED, "targets": [dictionary.target], "allow_empty_snapshot": True, "min_fact_count": 0})
    harness.publish(snapshot({f"k{number}": number for number in range(100)}))
    assert statuses(deliver()) == {dictionary.name: "DELIVERED"}
    dictionary.wait_items(read_payloads(harness))
    assert [(version["version"], version["items"]) for version in dictionary.versions] == [(1, 100)]
    harness.publish(snapshot({}))
    assert statuses(deliver()) == {dictionary.name: "DELIVERED"}
    dictionary.wait_items({})


def test_flow_run_is_identified_by_the_name_of_the_flow(harness: IngestHarness, up: Up, deliver: Deliver) -> None:
    """I23: another spelling of the address does not start the flow again; another flow is another run."""
    set_targets(harness, {"flow": {"name": FLOW, "url": up.api}})
    run_id = harness.publish(ONE)
    deliver()
    set_targets(harness, {"flow": {"name": FLOW, "url": f"{up.api}/"}}, {"flow": {"name": OTHER_FLOW, "url": up.api}})
    assert set(statuses(deliver()).values()) == {"DELIVERED"}
    assert len(list_started(up, run_id)) == 1
    assert len(list_started(up, run_id, OTHER_FLOW)) == 1


def test_other_conflict_is_retried(harness: IngestHarness, deliver: Deliver) -> None:
    """I23: a conflict that does not mean that the run exists is retried."""
    with WebhookServer(409) as hook:
        address = hook.url.removesuffix("/hook")
        set_targets(harness, {"flow": {"name": FLOW, "url": address}})
        harness.publish(ONE)
        (result,) = deliver().values()
        assert (result.status, result.error) == ("PENDING", "the server answered 409")
