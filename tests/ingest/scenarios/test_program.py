"""The daemons that watch inboxes: `penstock up` with its API, and `penstock ingest watch` alone."""

import json
import signal
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from penstock.app.platform import open_workplace
from penstock.ingest.run.hooks import Hooks
from penstock.ingest.tree import paths
from penstock.settings import Settings
from tests.app.scenarios.test_openapi import WITH_TOKENS, token
from tests.ingest.harness import KEYED, SUPPLIER, IngestHarness, snapshot
from tests.services.postgres import module_database
from tests.support.http import answered
from tests.support.processes import PENSTOCK, Server, Up
from tests.support.settings import write_config
from tests.support.types import Json
from tests.support.waiting import until

ONE, TWO, THREE = (snapshot({"A": price, "B": 2}) for price in (1, 2, 3))
BROKEN = snapshot({"A": "none", "B": "none"})
MANY = 400_000
QUICK = {"poll": 0.1}


class Watch(Server):
    """`penstock ingest watch` on a free port."""

    def __init__(self, harness: IngestHarness, **settings: Any) -> None:
        (harness.root.parent / "watch.yaml").write_text(json.dumps({"ingest": {**QUICK, **settings}}))
        given = ["--root", str(harness.root), "--config", "watch.yaml", "--json"]
        super().__init__("watch", [PENSTOCK, "ingest", "watch", *given], harness.root.parent)

    @property
    def runs(self) -> list[psutil.Process]:
        """The runs under way."""
        return [one for one in psutil.Process(self.pid).children() if "run" in one.cmdline()]


def metrics(api: str) -> list[str]:
    return httpx.get(f"{api}/actuator/prometheus").text.splitlines()


def large() -> bytes:
    """A file that takes a while."""
    return b"sku,price\n" + b"".join(b"k%d,%d\n" % (number, number) for number in range(MANY))


@pytest.fixture
def harness(tmp_path: Path) -> IngestHarness:
    return IngestHarness(tmp_path / "root", KEYED)


@pytest.mark.full
def test_the_watcher_alone(harness: IngestHarness) -> None:
    """I23, I13: without a database it publishes for all suppliers, shows health and metrics, and stops when asked."""
    slow = {**KEYED, "file_stability_window": 3600}
    harness.configure(slow, "globex")
    harness.publish(ONE)
    (harness.root.parent / "penstock.yaml").write_text("nobody: asked for this one")  # nor do the runs
    with Watch(harness) as watch:
        assert httpx.get(f"{watch.api}/actuator/health").json()["status"] == "UP"
        assert httpx.get(f"{watch.api}/actuator/health/readiness").status_code == 200
        assert f'penstock_ingest_state_facts{{supplier="{SUPPLIER}"}} 2.0' in metrics(watch.api)
        harness.drop(TWO)
        draft = harness.put(f"{paths.inbox('globex')}/price.csv.tmp", THREE)
        until(lambda: b"price.csv.tmp" in (harness.tree.read(paths.ledger("globex")) or b""), "the draft is seen")
        assert harness.current("globex") is None
        draft.rename(draft.with_suffix(""))  # whoever renames has finished: the window is not waited for
        until(lambda: harness.current("globex") is not None, "the renamed file is published")
        until(lambda: harness.names(paths.inbox(SUPPLIER)) == [], "both are served")
        counted = [
            f'penstock_ingest_runs_total{{code="",status="PASS",supplier="{one}"}} 1.0' for one in ("acme", "globex")
        ]
        until(lambda: set(counted) <= set(metrics(watch.api)), "both are counted")
        assert [fact["payload"]["price"] for fact in harness.facts()] == [2, 2]
        assert [fact["payload"]["price"] for fact in harness.facts("globex")] == [3, 2]
        assert watch.stop() == 0


@pytest.mark.full
def test_the_watcher_removes_what_is_old(harness: IngestHarness) -> None:
    """I12: without anybody's asking, as often as it is told to; what is current stays."""
    states = [paths.state(SUPPLIER, harness.publish(one)) for one in (ONE, TWO)]
    with Watch(harness, gc=0.2, retention={"state_retention_hours": 0}) as watch:
        until(lambda: not (harness.root / states[0]).exists(), "the replaced state is gone")
        harness.drop(THREE)
        until(lambda: not (harness.root / states[1]).exists(), "and so is the next, once it is replaced")
        assert watch.stop() == 0
    assert [fact["payload"]["price"] for fact in harness.facts()] == [3, 2]
    assert "Traceback" not in watch.log_file.read_text()


@pytest.mark.full
def test_one_damaged_supplier_does_not_stop_the_others(harness: IngestHarness) -> None:
    """I23: what cannot be run is told and tried again ever more seldom; all others are served."""
    harness.publish(ONE)
    link = harness.root / paths.CURRENT / SUPPLIER
    link.unlink()
    link.symlink_to(f"../../state_store/{SUPPLIER}/{SUPPLIER}_20200101T000000Z_000000")
    harness.drop(TWO)
    harness.configure(KEYED, "globex")
    with Watch(harness) as watch:
        until(lambda: "ingest_run_broke" in watch.log_file.read_text(), "the damage is told")
        harness.drop(THREE, supplier="globex")
        until(lambda: harness.current("globex") is not None, "the other one is served")
        assert watch.stop() == 0
    assert "Traceback" not in watch.log_file.read_text()
    assert "never retrieved" not in watch.log_file.read_text()
    assert harness.names(paths.inbox(SUPPLIER)) == ["price.csv"]


@pytest.mark.full
def test_a_run_may_die_and_the_watcher_lives(harness: IngestHarness) -> None:
    """I16, I23: kill -9 of a run costs nothing but its time; SIGTERM ends a run that is under way."""
    content = large()
    with Watch(harness) as watch:
        harness.drop(content)
        until(lambda: len(harness.tree.runs(SUPPLIER)) == 1, "a run is under way")
        (killed,) = harness.tree.runs(SUPPLIER)
        (run,) = watch.runs
        run.kill()
        until(lambda: harness.names(paths.inbox(SUPPLIER)) == [], "the next run publishes it")
        told = harness.told(paths.run(killed, paths.MANIFEST))
        assert (told["status"], told["failure_code"]) == ("FAIL", "INTERRUPTED")
        published = harness.current()
        assert published not in (None, killed)
        harness.drop(content + b"more,1\n")
        until(lambda: len(harness.tree.runs(SUPPLIER)) == 3, "another run is under way")
        (run,) = watch.runs
        assert watch.stop() == 0
        assert not run.is_running()
    (stopped,) = set(harness.tree.runs(SUPPLIER)) - {killed, published}
    assert harness.told(paths.run(stopped, paths.MANIFEST))["failure_code"] == "INTERRUPTED"
    assert harness.current() == published
    assert harness.names(paths.inbox(SUPPLIER)) == ["price.csv"]
    assert not (harness.root / paths.DATA / ".work" / SUPPLIER).exists()


@pytest.fixture(scope="module")
def server_database() -> Iterator[str]:
    """A database the module's server has to itself."""
    with module_database() as url:
        yield url


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> IngestHarness:
    """Serve a harness after two publications and a failure."""
    return IngestHarness(tmp_path_factory.mktemp("served") / "root", {**KEYED, "keep_raw": True})


@pytest.fixture(scope="module")
def api(served: IngestHarness, server_database: str) -> Iterator[str]:
    """The API of a running `penstock up`, as far as it is ingest's."""
    config = {"database": {"url": server_database}, "ingest": {"root": str(served.root), **QUICK}}
    with open_workplace(Settings.model_validate(config), uses_database=True) as place:
        for content in (ONE, BROKEN, TWO):
            served.drop(content)
            place.run(SUPPLIER, Hooks(), waits=False)
    folder = served.root.parent
    write_config(folder, config)
    with Up(folder) as up:
        yield f"{up.api}/api/v1/ingest"


def get(url: str, **params: Any) -> Json:
    return answered(httpx.get(url, params=params))


def test_a_dropped_file_is_published_by_itself(api: str, served: IngestHarness) -> None:
    """I23: `penstock up` watches; what came of it is under every address of the API."""
    served.configure(KEYED, "globex")
    served.drop(ONE, supplier="globex")
    until(lambda: bool(get(f"{api}/runs", supplier="globex", status="PASS")["runs"]), "it is published")
    (run,) = get(f"{api}/runs", supplier="globex")["runs"]
    assert run["run_id"] == served.current("globex")
    whole = get(f"{api}/runs/{run['run_id']}")
    assert whole["manifest"] == served.told(paths.run(run["run_id"], paths.MANIFEST))
    assert [(one["from"], one["to"]) for one in whole["history"]] == [(None, "RUNNING"), ("RUNNING", "PASS")]
    assert [(one["file_name"], one["why"]) for one in whole["moves"]] == [("price.csv", "published")]
    assert get(f"{api}/suppliers/globex/moves")["moves"] == whole["moves"]
    standing = {one["supplier"]: one for one in get(f"{api}/suppliers")["suppliers"]}["globex"]
    assert (standing["run_id"], standing["facts"], standing["fence"]) == (run["run_id"], 2, 1)
    assert get(f"{api}/suppliers/globex")["alerts"] == []


def test_a_state_is_read_whole(api: str, served: IngestHarness) -> None:
    """I14, §17: NDJSON whose sha256 is the pointer's and the ETag; the headers say which state it is."""
    state = get(f"{api}/state/{SUPPLIER}")
    assert (state["run_id"], state["fence"], state["manifest"]["status"]) == (served.current(), 2, "PASS")
    facts = httpx.get(f"{api}/state/{SUPPLIER}/facts")
    assert facts.headers["content-type"] == "application/x-ndjson"
    assert sha256(facts.content).hexdigest() == state["sha256"]
    assert facts.headers["etag"] == f'"{state["sha256"]}"'
    assert (facts.headers["x-run-id"], facts.headers["x-fence"]) == (state["run_id"], "2")
    assert [json.loads(line) for line in facts.text.splitlines()] == served.facts()


def test_runs_are_paged(api: str) -> None:
    """The latest first; page by page nothing is missed and nothing comes twice."""
    whole = get(f"{api}/runs", supplier=SUPPLIER)
    assert ([one["status"] for one in whole["runs"]], whole["next"]) == (["PASS", "FAIL", "PASS"], None)
    paged: list[Json] = []
    cursor: Json = {}
    for _ in whole["runs"]:
        page = get(f"{api}/runs", supplier=SUPPLIER, limit=1, **cursor)
        paged += page["runs"]
        cursor = {"cursor": page["next"]}
    assert paged == whole["runs"]
    assert cursor == {"cursor": None}
    failed = get(f"{api}/runs", status="FAIL")["runs"]
    bad = get(f"{api}/runs/{failed[0]['run_id']}/bad-rows", limit=1)
    assert (bad["bad_rows"], bad["reasons"], len(bad["rows"])) == (2, {"NOT_INTEGER": 2}, 1)
    assert bad["rows"][0]["raw_value"] == "none"


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("suppliers/nobody", 404, "SUPPLIER_NOT_FOUND"),
        ("suppliers/no%20name", 422, "BAD_SUPPLIER"),
        ("suppliers/no%20name/moves", 422, "BAD_SUPPLIER"),
        ("state/nobody", 404, "STATE_NOT_FOUND"),
        ("state/nobody/facts", 404, "STATE_NOT_FOUND"),
        ("runs/nothing", 404, "RUN_NOT_FOUND"),
        ("runs/acme_20200101T000000Z_000000", 404, "RUN_NOT_FOUND"),
        ("runs/acme_20200101T000000Z_000000/bad-rows", 404, "RUN_NOT_FOUND"),
        ("runs?cursor=nonsense", 422, "BAD_CURSOR"),
        ("runs?cursor=", 422, "BAD_CURSOR"),
        ("runs?limit=0", 422, None),
        ("runs?status=GOOD", 422, None),
        ("runs?supplier=%00", 422, "BAD_SUPPLIER"),
    ],
)
def test_mistakes_are_problems(api: str, path: str, status: int, code: str | None) -> None:
    """Each with its status and a code that stays."""
    answer = httpx.get(f"{api}/{path}")
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == code if code else answer.json()["code"]


@pytest.mark.full
def test_suppliers_belong_to_no_tenant(harness: IngestHarness) -> None:
    """I23: on an embedded database, with tokens: one that acts for a tenant sees nothing of suppliers."""
    config = {"ingest": {"root": str(harness.root), **QUICK}}
    write_config(harness.root.parent, config)
    harness.drop(ONE)
    with Up(harness.root.parent, env=WITH_TOKENS) as up:
        api = f"{up.api}/api/v1/ingest"
        for path in ("suppliers", "runs", f"state/{SUPPLIER}/facts"):
            refused = httpx.get(f"{api}/{path}", headers=token())
            assert (refused.status_code, refused.json()["code"]) == (403, "NOT_FOR_TENANTS")
            assert httpx.get(f"{api}/{path}").status_code == 401
        ours = token(tenant_id=None)
        until(lambda: harness.current() is not None, "it is published")
        until(lambda: "PASS" in httpx.get(f"{api}/runs", headers=ours).text, "it is recorded")
        assert httpx.get(f"{api}/state/{SUPPLIER}/facts", headers=ours).status_code == 200
        assert up.stop(signal.SIGINT) == 0
