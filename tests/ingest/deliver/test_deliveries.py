"""Who is told of a publication: dictionaries and flows exactly once, webhooks at least once."""

import hashlib
import hmac
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from uuid import uuid4

import httpx
import pytest

from penstock.ingest.config import AlertSection
from penstock.ingest.deliver import targets
from penstock.ingest.deliver.deliveries import Deliveries
from penstock.ingest.model import Alert
from penstock.ingest.state.reader import open_state
from penstock.ingest.state.supplier_status import standing
from penstock.ingest.supplier import DictionaryTarget, load_supplier
from penstock.ingest.tree import paths
from penstock.ingest.tree.async_bridge import Bridge
from penstock.kernel.clock import ManualClock
from penstock.kernel.errors import PenstockError
from penstock.refdata import contract
from tests.ingest.harness import KEYED, SUPPLIER, IngestHarness, aim, clock_of_today, snapshot
from tests.services.postgres import module_database
from tests.support.processes import Up, penstock
from tests.support.settings import write_config
from tests.support.types import Json
from tests.support.waiting import until

ONE, TWO, THREE = (snapshot({"A": price, "B": 2}) for price in (1, 2, 3))
SECRET = "hush, hush"
FLOW, OTHER_FLOW = "after-prices", "also-after-prices"


class WebhookCall(NamedTuple):
    """A call that came."""

    path: str
    headers: dict[str, str]
    body: bytes


class WebhookServer(AbstractContextManager["WebhookServer"]):
    """An address that is told of publications; *answers* says with which status, call by call, and then with 204."""

    def __init__(self, *answers: int) -> None:
        self.calls: list[WebhookCall] = []
        self.answers = list(answers)
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"] or 0))
                hook.calls.append(
                    WebhookCall(self.path, {name.lower(): text for name, text in self.headers.items()}, body)
                )
                self.send_response(hook.answers.pop(0) if hook.answers else 204)
                self.send_header("location", "/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                self.do_POST()

            def log_message(self, *_: Any) -> None:
                """Nothing: what comes is kept."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)


@pytest.fixture
def clock() -> ManualClock:
    return clock_of_today()


@pytest.fixture
def deliver(harness: IngestHarness, clock: ManualClock) -> Iterator[Callable[[], dict[str, str]]]:
    """Tell whoever was not told yet, by the configuration as it stands; what came of it."""
    with closing(Bridge()) as bridge:

        def deliver() -> dict[str, str]:
            config, _ = load_supplier(harness.root / paths.config(SUPPLIER))
            return Deliveries(harness.tree, SUPPLIER, config, bridge, clock).deliver()

        yield deliver


Deliver = Callable[[], dict[str, str]]


def markers(harness: IngestHarness) -> list[Path]:
    return sorted((harness.root / paths.run(harness.current() or "", "deliveries")).glob("*.json"))


def alerts(harness: IngestHarness, clock: ManualClock) -> list[Alert]:
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
            assert alerts(harness, clock) == [Alert.UNDELIVERED]
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


def test_redirects_are_not_followed(harness: IngestHarness, deliver: Deliver) -> None:
    """I23: what is signed for one address is not handed to another."""
    with WebhookServer(302, 307) as hook:
        aim(harness, {"webhook": {"url": hook.url}})
        harness.publish(ONE)
        assert deliver() == {f"webhook {hook.url}": f"not yet: {hook.url} answered 302"}
    assert [call.path for call in hook.calls] == ["/hook"]


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


@pytest.fixture(scope="module")
def server_database() -> Iterator[str]:
    """A database the module's server has to itself."""
    with module_database() as url:
        yield url


@pytest.fixture(scope="module")
def up(server_database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    config = {
        "database": {"url": server_database},
        "refdata": {"dictionaries": [{"code": "PRICES"}]},
        "flows": {"folder": str(folder / "flows")},
    }
    write_config(folder, config)
    (folder / "flows").mkdir()
    for name in (FLOW, OTHER_FLOW):
        (folder / "flows" / f"{name}.yaml").write_text(json.dumps({"name": name}))
    with Up(folder) as up:
        yield up


class Dictionary:
    """PRICES of a tenant nobody else uses."""

    def __init__(self, up: Up) -> None:
        self.tenant = f"t{uuid4().hex[:8]}"
        self._up = up
        self.aim = {"dictionary": {"tenant": self.tenant, "code": "PRICES", "url": up.api}}
        self.name = f"dictionary {self.tenant}/PRICES at {up.api}"

    @property
    def versions(self) -> list[Json]:
        """What was committed, the latest first."""
        found = httpx.get(f"{self._up.api}/v1/tenants/{self.tenant}/history/PRICES").json()
        versions: list[Json] = found["versions"]
        return versions

    def items(self) -> dict[str, Any]:
        """What a pod answers."""
        answer = httpx.get(f"{self._up.query}/v1/tenants/{self.tenant}/dictionaries/PRICES/all")
        return {one["key"]: one["value"] for one in answer.json()["items"]} if answer.status_code == 200 else {}

    def shows(self, expected: dict[str, Any]) -> None:
        until(lambda: self.items() == expected, f"the pod has {len(expected)} items", within=15)


@pytest.fixture
def dictionary(up: Up) -> Dictionary:
    return Dictionary(up)


def payloads(harness: IngestHarness) -> dict[str, Any]:
    return {fact["payload"]["sku"]: fact["payload"] for fact in harness.facts()}


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
    assert [one["version"] for one in dictionary.versions] == [2, 1]


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
    assert [one["version"] for one in dictionary.versions] == [1]


def test_told_late_changes_nothing(harness: IngestHarness, dictionary: Dictionary, deliver: Deliver) -> None:
    """I23: a writer that was stopped for hours cannot bring an older state back."""
    aim(harness, dictionary.aim)
    harness.publish(ONE)
    target = DictionaryTarget.model_validate(dictionary.aim["dictionary"])
    with open_state(harness.tree, SUPPLIER) as old, closing(Bridge()) as bridge:
        harness.publish(TWO)
        deliver()
        with pytest.raises(PenstockError) as told:
            bridge.call(targets.fill_dictionary(target, "sku", old))
    assert isinstance(told.value, targets.Refused)
    dictionary.shows(payloads(harness))
    assert [one["version"] for one in dictionary.versions] == [1]


def test_a_large_state_goes_in_several_chunks(
    harness: IngestHarness, dictionary: Dictionary, deliver: Deliver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I23: however many commands it takes, it is one version; an empty state is one command."""
    monkeypatch.setattr(contract, "_ITEM_ROOM", 1_000)
    harness.configure({**KEYED, "targets": [dictionary.aim], "allow_empty_snapshot": True, "min_fact_count": 0})
    harness.publish(snapshot({f"k{number}": number for number in range(100)}))
    assert deliver() == {dictionary.name: "done"}
    dictionary.shows(payloads(harness))
    assert [(one["version"], one["items"]) for one in dictionary.versions] == [(1, 100)]
    harness.publish(snapshot({}))
    assert deliver() == {dictionary.name: "done"}
    dictionary.shows({})


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
    assert alerts(harness, clock) == [Alert.UNDELIVERED]
    harness.publish(TWO)
    came = deliver()
    assert came[dictionary.name] == "done"
    assert "NOT_YET" in came[dictionary.name.replace("PRICES", "NOT_YET")]


def started(up: Up, run_id: str, flow: str = FLOW) -> list[Json]:
    """The runs of the flow that a run of ingest has started."""
    runs = httpx.get(f"{up.api}/api/v1/flow_runs", params={"flow": flow, "limit": 100}).json()["runs"]
    found = [httpx.get(f"{up.api}/api/v1/flow_runs/{run['runId']}").json() for run in runs]
    return [run for run in found if run["scope"]["runId"] == run_id]


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


def test_a_flow_that_is_not_there_yet(harness: IngestHarness, up: Up, clock: ManualClock, deliver: Deliver) -> None:
    """I23: somebody has to mend it: told, and tried again; the publication stands."""
    aim(harness, {"flow": {"name": "not-yet", "url": up.api}})
    run_id = harness.publish(ONE)
    (came,) = deliver().values()
    assert came.startswith("not yet: ")
    assert "not-yet" in came
    assert harness.current() == run_id
    assert alerts(harness, clock) == [Alert.UNDELIVERED]


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
