"""The watcher: publishes files as they arrive, deletes expired files, and survives the crash of a run."""

import json
from typing import Any

import httpx
import psutil
import pytest

from penstock.ingest.tree import paths
from tests.ingest.harness import KEYED, QUICK, SUPPLIER, IngestHarness, snapshot
from tests.support.processes import PENSTOCK, Server
from tests.support.types import Json
from tests.support.wait import until

ONE, TWO, THREE = (snapshot({"A": price, "B": 2}) for price in (1, 2, 3))
ROWS = 400_000


class WatchProcess(Server):
    """`penstock ingest watch` on a free port."""

    def __init__(self, harness: IngestHarness, **settings: Any) -> None:
        (harness.root.parent / "watch.yaml").write_text(json.dumps({"ingest": {**QUICK, **settings}}))
        options = ["--root", str(harness.root), "--config", "watch.yaml", "--json"]
        super().__init__("watch", [PENSTOCK, "ingest", "watch", *options], harness.root.parent)

    @property
    def runs(self) -> list[psutil.Process]:
        """The processes of active runs."""
        return [child for child in psutil.Process(self.pid).children() if "run" in child.cmdline()]

    def read_log(self, event: str) -> list[Json]:
        """Return the log entries of *event*."""
        lines = [line for line in self.log_file.read_text().splitlines() if line.startswith("{")]
        return [entry for entry in map(json.loads, lines) if entry.get("event") == event]


def read_metrics(api: str) -> list[str]:
    return httpx.get(f"{api}/actuator/prometheus").text.splitlines()


def make_large_file() -> bytes:
    """Return a file that takes a while to process."""
    return b"sku,price\n" + b"".join(b"k%d,%d\n" % (number, number) for number in range(ROWS))


@pytest.mark.full
def test_watcher_publishes_for_all_suppliers(harness: IngestHarness) -> None:
    """I23, I13: without a database it publishes files, serves health and metrics, and stops on request."""
    slow = {**KEYED, "file_stability_window": 3600}
    harness.configure(slow, "globex")
    harness.publish(ONE)
    (harness.root.parent / "penstock.yaml").write_text("unknown_key: not read, because of --config")
    with WatchProcess(harness) as watch:
        assert httpx.get(f"{watch.api}/actuator/health").json()["status"] == "UP"
        assert httpx.get(f"{watch.api}/actuator/health/readiness").status_code == 200
        assert f'penstock_ingest_state_facts{{supplier="{SUPPLIER}"}} 2.0' in read_metrics(watch.api)
        harness.drop(TWO)
        draft = harness.put(f"{paths.make_inbox_path('globex')}/price.csv.tmp", THREE)
        until(
            lambda: b"price.csv.tmp" in (harness.tree.read(paths.make_ledger_path("globex")) or b""),
            "the draft is seen",
        )
        assert harness.current("globex") is None
        draft.rename(draft.with_suffix(""))  # a rename from a temporary name ends the wait for the window
        until(lambda: harness.current("globex") is not None, "the renamed file is published")
        until(lambda: harness.names(paths.make_inbox_path(SUPPLIER)) == [], "both are served")
        counts = [
            f'penstock_ingest_runs_total{{code="",status="PASS",supplier="{supplier}"}} 1.0'
            for supplier in ("acme", "globex")
        ]
        until(lambda: set(counts) <= set(read_metrics(watch.api)), "both are counted")
        assert [fact["payload"]["price"] for fact in harness.facts()] == [2, 2]
        assert [fact["payload"]["price"] for fact in harness.facts("globex")] == [3, 2]
        assert watch.stop() == 0


@pytest.mark.full
def test_watcher_logs_each_file_once(harness: IngestHarness) -> None:
    """Log: the watcher logs a published, a rejected and a duplicate file once each, with file and run."""
    with WatchProcess(harness) as watch:
        for name, content in (("one.csv", ONE), ("bad.csv", snapshot({"A": "none"})), ("again.csv", ONE)):
            harness.drop(content, name)
            until(lambda: harness.names(paths.make_inbox_path(SUPPLIER)) == [], f"{name} is moved")
        until(lambda: len(watch.read_log("file_duplicate")) == 1, "the duplicate is logged")
        assert watch.stop() == 0
    (published,) = watch.read_log("file_published")
    assert (published["supplier"], published["file"], published["run_id"]) == (SUPPLIER, "one.csv", harness.current())
    assert (published["level"], published["fence"], published["good_rows"], published["bad_rows"]) == ("info", 1, 2, 0)
    (rejected,) = watch.read_log("file_rejected")
    assert (rejected["level"], rejected["file"], rejected["code"]) == ("warning", "bad.csv", "DQ_TOO_MANY_BAD_ROWS")
    assert [entry["file"] for entry in watch.read_log("file_duplicate")] == ["again.csv"]


@pytest.mark.full
def test_watcher_deletes_expired_files(harness: IngestHarness) -> None:
    """I12: expired files are deleted periodically; the published state stays."""
    states = [paths.make_state_path(SUPPLIER, harness.publish(content)) for content in (ONE, TWO)]
    with WatchProcess(harness, gc=0.2, retention={"state_retention_hours": 0}) as watch:
        until(lambda: not (harness.root / states[0]).exists(), "the replaced state is deleted")
        harness.drop(THREE)
        until(lambda: not (harness.root / states[1]).exists(), "the next state is deleted after it is replaced")
        assert watch.stop() == 0
    assert [fact["payload"]["price"] for fact in harness.facts()] == [3, 2]
    assert "Traceback" not in watch.log_file.read_text()


@pytest.mark.full
def test_damaged_supplier_does_not_stop_the_others(harness: IngestHarness) -> None:
    """I23: a supplier that cannot be run is logged and retried with growing pauses; the others are served."""
    harness.publish(ONE)
    link = harness.root / paths.CURRENT / SUPPLIER
    link.unlink()
    link.symlink_to(f"../../state_store/{SUPPLIER}/{SUPPLIER}_20200101T000000Z_000000")
    harness.drop(TWO)
    harness.configure(KEYED, "globex")
    with WatchProcess(harness) as watch:
        until(lambda: "ingest_process_failed" in watch.log_file.read_text(), "the damage is logged")
        harness.drop(THREE, supplier="globex")
        until(lambda: harness.current("globex") is not None, "the other supplier is served")
        assert watch.stop() == 0
    assert "Traceback" not in watch.log_file.read_text()
    assert "never retrieved" not in watch.log_file.read_text()
    assert harness.names(paths.make_inbox_path(SUPPLIER)) == ["price.csv"]


@pytest.mark.full
def test_watcher_survives_the_crash_of_a_run(harness: IngestHarness) -> None:
    """I16, I23: kill -9 of a run loses nothing; SIGTERM of the watcher stops the active run."""
    content = make_large_file()
    with WatchProcess(harness) as watch:
        harness.drop(content)
        until(lambda: len(harness.tree.list_runs(SUPPLIER)) == 1, "a run is active")
        (killed,) = harness.tree.list_runs(SUPPLIER)
        (run,) = watch.runs
        run.kill()
        until(lambda: harness.names(paths.make_inbox_path(SUPPLIER)) == [], "the next run publishes the file")
        manifest = harness.read_json(paths.make_run_path(killed, paths.MANIFEST))
        assert (manifest["status"], manifest["failure_code"]) == ("FAIL", "INTERRUPTED")
        published = harness.current()
        assert published not in (None, killed)
        harness.drop(content + b"more,1\n")
        until(lambda: len(harness.tree.list_runs(SUPPLIER)) == 3, "another run is active")
        (run,) = watch.runs
        assert watch.stop() == 0
        assert not run.is_running()
    (stopped,) = set(harness.tree.list_runs(SUPPLIER)) - {killed, published}
    assert harness.read_json(paths.make_run_path(stopped, paths.MANIFEST))["failure_code"] == "INTERRUPTED"
    assert harness.current() == published
    assert harness.names(paths.make_inbox_path(SUPPLIER)) == ["price.csv"]
    assert not (harness.root / paths.DATA / ".work" / SUPPLIER).exists()
