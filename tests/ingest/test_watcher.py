"""The watcher alone: it publishes what comes, removes what is old, and lives on when a run dies."""

import json
from typing import Any

import httpx
import psutil
import pytest

from penstock.ingest.tree import paths
from tests.ingest.harness import KEYED, QUICK, SUPPLIER, IngestHarness, snapshot
from tests.support.processes import PENSTOCK, Server
from tests.support.wait import until

ONE, TWO, THREE = (snapshot({"A": price, "B": 2}) for price in (1, 2, 3))
MANY = 400_000


class Watch(Server):
    """`penstock ingest watch` on a free port."""

    def __init__(self, harness: IngestHarness, **settings: Any) -> None:
        (harness.root.parent / "watch.yaml").write_text(json.dumps({"ingest": {**QUICK, **settings}}))
        given = ["--root", str(harness.root), "--config", "watch.yaml", "--json"]
        super().__init__("watch", [PENSTOCK, "ingest", "watch", *given], harness.root.parent)

    @property
    def runs(self) -> list[psutil.Process]:
        """The runs under way."""
        return [child for child in psutil.Process(self.pid).children() if "run" in child.cmdline()]


def metrics(api: str) -> list[str]:
    return httpx.get(f"{api}/actuator/prometheus").text.splitlines()


def large() -> bytes:
    """A file that takes a while."""
    return b"sku,price\n" + b"".join(b"k%d,%d\n" % (number, number) for number in range(MANY))


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
        until(lambda: len(harness.tree.list_runs(SUPPLIER)) == 1, "a run is under way")
        (killed,) = harness.tree.list_runs(SUPPLIER)
        (run,) = watch.runs
        run.kill()
        until(lambda: harness.names(paths.inbox(SUPPLIER)) == [], "the next run publishes it")
        told = harness.read_json(paths.run(killed, paths.MANIFEST))
        assert (told["status"], told["failure_code"]) == ("FAIL", "INTERRUPTED")
        published = harness.current()
        assert published not in (None, killed)
        harness.drop(content + b"more,1\n")
        until(lambda: len(harness.tree.list_runs(SUPPLIER)) == 3, "another run is under way")
        (run,) = watch.runs
        assert watch.stop() == 0
        assert not run.is_running()
    (stopped,) = set(harness.tree.list_runs(SUPPLIER)) - {killed, published}
    assert harness.read_json(paths.run(stopped, paths.MANIFEST))["failure_code"] == "INTERRUPTED"
    assert harness.current() == published
    assert harness.names(paths.inbox(SUPPLIER)) == ["price.csv"]
    assert not (harness.root / paths.DATA / ".work" / SUPPLIER).exists()
