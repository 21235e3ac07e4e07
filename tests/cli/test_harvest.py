"""`penstock harvest` as a user types it, against a running `penstock up`: output, exit codes, and what to do next."""

import json
import re
from collections.abc import Iterator
from unittest.mock import Mock
from uuid import UUID

import pytest

from penstock.cli import harvest
from penstock.cli.terminal.progress import ProgressBar
from tests.harvest.simulator_process import RECORDS, SimulatorProcess
from tests.harvest.stepper import FEED, feed
from tests.services.postgres import module_database
from tests.support.processes import ServerCli, Up, penstock_on_a_terminal
from tests.support.settings import write_config
from tests.support.wait import until

UNKNOWN = str(UUID(int=7))
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def source() -> Iterator[SimulatorProcess]:
    simulator = SimulatorProcess()
    yield simulator
    simulator.stop()


@pytest.fixture(scope="module")
def server(source: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("server")
    with module_database() as url:
        feeds = {FEED: feed(source.url), "untouched": feed(source.url)}
        config = {"database": {"url": url}, "harvest": {"retry_after": 0.2, "feeds": feeds}}
        write_config(folder, config)
        with Up(folder) as up:
            yield up


@pytest.fixture
def cli(server: Up, source: SimulatorProcess) -> Iterator[ServerCli]:
    source.fail()
    yield ServerCli("harvest", server.api)
    source.fail()


@pytest.mark.full
def test_a_run_is_waited_for(cli: ServerCli) -> None:
    """H13: 0 when it completed, with what came of it and nothing about progress where there is no terminal."""
    done = cli.run("run", FEED, "--full", "--wait")
    assert (done.code, done.err) == (0, "")
    first, second, third = done.out.splitlines()
    run_id = first.split()[1]
    assert first == f"completed  {run_id}  full"
    assert re.fullmatch(rf"{RECORDS} records in \d+ partitions, \d+ consolidated, 0 rejected, 0 deleted", second)
    assert third.startswith("synchronised up to ")
    document = cli.json("run", FEED, "--wait")
    assert (document["state"], document["runType"], document["records"]) == ("completed", "incremental", 0)
    assert document["watermarkBefore"] is not None
    partitions = cli.run("partitions", run_id)
    assert partitions.code == 0
    head, *rows = partitions.out.splitlines()
    assert head.split() == ["partition", "bounds", "status", "fetched", "counted", "offset", "pass", "worker", "error"]
    assert all(row.split()[0].startswith("partition-") and " completed " in row for row in rows)
    assert len(cli.json("partitions", run_id)["partitions"]) == len(rows)
    assert cli.run("rejects", run_id).out == f"run {run_id} has no rejected records\n"
    assert cli.json("rejects", run_id)["rejects"] == []


def test_feeds_are_listed_and_shown(cli: ServerCli) -> None:
    """H13: all feeds, or the last runs of one; a feed that was never run says how to."""
    run_id = cli.json("run", FEED, "--wait")["runId"]
    every = cli.run("ls")
    (row,) = [line for line in every.out.splitlines() if line.startswith(FEED)]
    assert run_id in row
    assert "completed" in row
    (never,) = [line for line in every.out.splitlines() if line.startswith("untouched")]
    assert "not scheduled" in never
    assert [feed["feed"] for feed in cli.json("ls")["feeds"]] == [FEED, "untouched"]
    shown = cli.json("show", FEED, "--limit", "1")
    assert (shown["runs"][0]["runId"], shown["feed"]) == (run_id, FEED)
    assert run_id in cli.run("show", FEED).out
    assert "untouched has no runs; `penstock harvest run untouched` starts one\n" in cli.run("show", "untouched").out
    assert cli.run("watermark", "untouched").out == "untouched has no watermark yet\n"
    assert cli.run("alerts", "untouched").out == "untouched has no alerts\n"


def test_the_watermark_and_a_record(cli: ServerCli, source: SimulatorProcess) -> None:
    """H13: up to when a feed is known, and where a record is."""
    run_id = cli.json("run", FEED, "--full", "--wait")["runId"]
    shown = cli.run("watermark", FEED, "--limit", "1")
    assert (shown.code, len(shown.out.splitlines()), run_id in shown.out) == (0, 2, True)
    document = cli.json("watermark", FEED)
    assert document["current"] == document["blob"] == document["history"][0]
    key = next(iter(source.keys()))
    record = cli.run("record", FEED, key)
    assert record.out.splitlines()[0] == key
    assert f"fetched by run {run_id}" in record.out
    assert cli.json("record", FEED, key)["canonical"]["rule"] in ("all", None)


@pytest.mark.full
def test_a_run_that_fails_is_taken_up_again(cli: ServerCli, source: SimulatorProcess) -> None:
    """H13, H11: 1 with why and the next step; `retry` takes it up, and then there is nothing to retry."""
    source.fail(rate_500=1.0)
    failed = cli.run("run", FEED, "--full", "--wait")
    assert failed.code == 1
    assert failed.out.startswith("failed  ")
    assert "SOURCE_ERROR" in failed.out
    assert "hint: " in failed.out
    alerts = cli.run("alerts", FEED)
    assert "PLAN_FAILED" in alerts.out.splitlines()[1]
    source.fail(latency_ms=700)  # long enough to be caught in the middle
    run_id = cli.json("run", FEED, "--full")["runId"]
    until(lambda: cli.json("show", FEED)["runs"][0]["state"] in ("created", "workers_running"), "it is planned")
    cancelled = cli.run("cancel", run_id, "--reason", "too slow")
    assert (cancelled.code, cancelled.out) == (0, f"run {run_id} is consolidation_skipped\n")
    assert "too slow" in cli.run("partitions", run_id).out
    assert "(" in cli.run("show", FEED).out
    assert "only a run that is being planned or fetched can be cancelled" in cli.refused(6, "cancel", run_id)
    source.fail()
    retried = cli.run("retry", run_id, "partition-0")
    assert (retried.code, retried.out) == (0, "retrying: partition-0\n")
    assert "partition-1" in cli.run("retry", run_id).out
    until(lambda: cli.json("show", FEED)["runs"][0]["state"] == "completed", "it completes")
    assert "no partition failed" in cli.refused(6, "retry", run_id)
    assert cli.json("alerts", FEED)["alerts"][0]["code"] == "CONSOLIDATION_SKIPPED"


@pytest.mark.full
def test_force_says_why(cli: ServerCli, source: SimulatorProcess) -> None:
    """H5, H13: without a reason it is a mistake of usage; with one the run is consolidated, and that is an alert."""
    source.fail(latency_ms=700)
    run_id = cli.json("run", FEED, "--full")["runId"]
    until(lambda: cli.json("show", FEED)["runs"][0]["state"] in ("created", "workers_running"), "it is planned")
    assert cli.json("cancel", run_id)["state"] == "consolidation_skipped"
    assert cli.run("force", run_id).code == 2
    assert "it is stored with the run" in cli.refused(2, "force", run_id, "--reason", "  ")
    forced = cli.run("force", run_id, "--reason", "half will do")
    assert forced.code == 0
    assert run_id in forced.out
    until(lambda: cli.json("show", FEED)["runs"][0]["state"] == "completed", "it completes")
    assert "half will do" in cli.run("alerts", FEED).out


def test_a_second_run_is_refused(cli: ServerCli, source: SimulatorProcess) -> None:
    """H2: exit code 6 with the id of the active run, as text and as JSON; 124 after a timeout; the run continues."""
    source.fail(latency_ms=700)
    late = cli.run("run", FEED, "--full", "--wait", "--timeout", "1")
    assert (late.code, late.out) == (124, "")
    assert "has not ended after 1 s" in late.err
    assert f"`penstock harvest show {FEED} --url {cli.url}` shows it" in late.err
    active = cli.json("show", FEED)["runs"][0]["runId"]
    expected = cli.refused(6, "run", FEED)
    assert f"run {active} of {FEED} is " in expected
    assert "hint: " in expected
    error = json.loads(cli.run("run", FEED, "--json").err)["error"]
    assert (error["code"], error["runId"]) == ("RUN_ACTIVE", active)
    source.fail()
    until(lambda: cli.json("show", FEED)["runs"][0]["state"] == "completed", "it went on")


@pytest.mark.parametrize(
    ("args", "code", "expected"),
    [
        (["run", "unknown"], 5, "there is no feed 'unknown'"),
        (["show", "unknown"], 5, f"feeds in harvest.feeds: {FEED}, untouched"),
        (["watermark", "unknown"], 5, "there is no feed"),
        (["alerts", "unknown"], 5, "there is no feed"),
        (["record", FEED, "unknown"], 5, "has stored a record 'unknown'"),
        (["partitions", UNKNOWN], 5, "`penstock harvest ls --url"),
        (["rejects", UNKNOWN], 5, "there is no run"),
        (["retry", UNKNOWN], 5, "there is no run"),
        (["force", UNKNOWN, "--reason", "x"], 5, "there is no run"),
        (["cancel", UNKNOWN], 5, "there is no run"),
        (["partitions", "nonsense"], 2, "RUN: 'nonsense' is not a UUID"),
        (["run", "no name"], 2, "feed"),
        (["run", "../x"], 5, "there is no route"),
    ],
)
def test_errors_have_an_exit_code_and_a_hint(cli: ServerCli, args: list[str], code: int, expected: str) -> None:
    """Exit codes as documented; a sentence, never a traceback."""
    assert expected in cli.refused(code, *args)


@pytest.mark.parametrize("args", [["run", FEED, "--wait"], ["ls"], ["retry", UNKNOWN]])
def test_an_unreachable_server(args: list[str]) -> None:
    """7, and how to start one."""
    expected = ServerCli("harvest", NOWHERE).refused(7, *args)
    assert "does not answer" in expected
    assert "hint: `penstock up` starts a server" in expected


def test_progress_on_a_terminal(cli: ServerCli, source: SimulatorProcess) -> None:
    """H13: counting, fetching and consolidating are shown on one line, which is gone at the end; the result is not."""
    source.change(updates=RECORDS)
    source.fail(latency_ms=120)
    done = penstock_on_a_terminal("harvest", "run", FEED, "--full", "--wait", "--url", cli.url)
    assert done.code == 0
    assert done.out.startswith("completed  ")
    assert "\x1b" not in done.out
    assert f"{FEED}: counting the source, " in done.err
    assert f"{FEED}: fetching, " in done.err
    assert "partitions" in done.err
    assert "█" in done.err
    assert done.err.endswith("\r\x1b[K")
    assert "\n" not in done.err


def test_every_stage_has_its_words() -> None:
    """H13: how far each stage is, as a part of what it has to do."""
    bar = Mock(spec=ProgressBar)
    fetching = {"records": 50, "counted": 200, "completedWorkers": 1, "failedWorkers": 1, "expectedWorkers": 4}
    for run in (
        {"state": "planning", "counts": 7},
        {"state": "workers_running", **fetching},
        {"state": "consolidating", "consolidated": 30, "records": 120},
        {"state": "consolidating", "consolidated": 0, "records": 0},
        {"state": "unknown"},
    ):
        harvest._show_progress(bar, run)
    assert [call.args for call in bar.show.call_args_list] == [
        ("counting the source, 7 requests",),
        ("fetching, 2/4 partitions", 50, 0.25),
        ("consolidating", 30, 0.25),
        ("consolidating", 0, None),
    ]
