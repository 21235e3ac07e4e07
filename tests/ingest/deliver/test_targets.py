"""Each target: dictionaries, flows and webhooks, and what they are handed."""

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
    payloads,
    started,
)
from tests.ingest.harness import KEYED, SUPPLIER, IngestHarness, aim, snapshot
from tests.support.processes import Up


def test_redirects_are_not_followed(harness: IngestHarness, deliver: Deliver) -> None:
    """I23: what is signed for one address is not handed to another."""
    with WebhookServer(302, 307) as hook:
        aim(harness, {"webhook": {"url": hook.url}})
        harness.publish(ONE)
        assert deliver() == {f"webhook {hook.url}": f"not yet: {hook.url} answered 302"}
    assert [call.path for call in hook.calls] == ["/hook"]


def test_a_dictionary_becomes_what_is_published(
    harness: IngestHarness, dictionary: Dictionary, deliver: Deliver
) -> None:
    """I23: the pod answers with the facts, by their key; what is gone from the file is gone there."""
    aim(harness, dictionary.aim)
    harness.publish(snapshot({"A": 1, "B": 2, "C": 3}))
    assert deliver() == {dictionary.name: "done"}
    dictionary.shows(payloads(harness))
    harness.publish(snapshot({"B": 7, "D": 4}))
    assert deliver() == {dictionary.name: "done"}
    dictionary.shows({"B": {"price": 7, "sku": "B"}, "D": {"price": 4, "sku": "D"}})
    assert [version["version"] for version in dictionary.versions] == [2, 1]


def test_told_late_changes_nothing(harness: IngestHarness, dictionary: Dictionary, deliver: Deliver) -> None:
    """I23: a writer that was stopped for hours cannot bring an older state back."""
    aim(harness, dictionary.aim)
    harness.publish(ONE)
    target = DictionaryTarget.model_validate(dictionary.aim["dictionary"])
    with open_state(harness.tree, SUPPLIER) as old, closing(AsyncBridge()) as bridge:
        harness.publish(TWO)
        deliver()
        with pytest.raises(PenstockError) as told:
            bridge.call(targets.fill_dictionary(target, "sku", old))
    assert isinstance(told.value, targets.DeliveryRefused)
    dictionary.shows(payloads(harness))
    assert [version["version"] for version in dictionary.versions] == [1]


def test_a_large_state_goes_in_several_chunks(
    harness: IngestHarness, dictionary: Dictionary, deliver: Deliver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I23: however many commands it takes, it is one version; an empty state is one command."""
    monkeypatch.setattr(contract, "_ITEM_ROOM", 1_000)
    harness.configure({**KEYED, "targets": [dictionary.aim], "allow_empty_snapshot": True, "min_fact_count": 0})
    harness.publish(snapshot({f"k{number}": number for number in range(100)}))
    assert deliver() == {dictionary.name: "done"}
    dictionary.shows(payloads(harness))
    assert [(version["version"], version["items"]) for version in dictionary.versions] == [(1, 100)]
    harness.publish(snapshot({}))
    assert deliver() == {dictionary.name: "done"}
    dictionary.shows({})


def test_a_run_of_a_flow_is_known_by_its_name_alone(harness: IngestHarness, up: Up, deliver: Deliver) -> None:
    """I23: the server's address written otherwise is the same server; another flow is another run."""
    aim(harness, {"flow": {"name": FLOW, "url": up.api}})
    run_id = harness.publish(ONE)
    deliver()
    aim(harness, {"flow": {"name": FLOW, "url": f"{up.api}/"}}, {"flow": {"name": OTHER_FLOW, "url": up.api}})
    assert set(deliver().values()) == {"done"}
    assert len(started(up, run_id)) == 1
    assert len(started(up, run_id, OTHER_FLOW)) == 1


def test_a_server_that_refuses_for_another_reason_is_asked_again(harness: IngestHarness, deliver: Deliver) -> None:
    """I23: a conflict that is not about our run is not taken for a start."""
    with WebhookServer(409) as hook:
        address = hook.url.removesuffix("/hook")
        aim(harness, {"flow": {"name": FLOW, "url": address}})
        harness.publish(ONE)
        assert deliver() == {f"flow {FLOW} at {address}": "not yet: the server answered 409"}
