"""SIGKILL of workers, of servers and of PostgreSQL at any time: nothing is lost, and nothing counts twice."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from random import Random

import httpx
import psutil
import pytest

from penstock.app.schema import list_platform_migrations
from penstock.kernel.db import migrate
from penstock.kernel.db.database import Database
from penstock.kernel.db.embedded import run_embedded_postgres
from penstock.kernel.errors import Transient
from penstock.settings import Settings
from tests.flows.scenarios.crash_scenarios import (
    FlowsCrashHarness,
    RunScenario,
    artifact_chain,
    chain,
    crash_harness,
    map_over,
    nested,
    random_scenario,
)
from tests.flows.scenarios.worker_process import DONE, FlowWorkerProcess, WorkerSetup
from tests.support.processes import Up
from tests.support.settings import write_config
from tests.support.soak import Campaign, examples
from tests.support.wait import becomes, until

SECTION = {"lease": timedelta(seconds=1), "max_lost": 10_000}
LONG = {"lease": timedelta(minutes=10)}
WITHIN = 90.0
STORIES = examples(8, soak=12)
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
async def harness(database_url: str, tmp_path: Path) -> AsyncIterator[FlowsCrashHarness]:
    async with crash_harness(database_url, tmp_path, SECTION) as harness:
        yield harness


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_workers_may_die_at_any_time(
    harness: FlowsCrashHarness, database_url: str, tmp_path: Path, campaign: Campaign
) -> None:
    """F3, F4, F6, F11: in each round some of three processes are killed, during runs of all kinds."""
    campaign.counts_items = True
    place = WorkerSetup(database_url, tmp_path, SECTION)
    children = [FlowWorkerProcess(place) for _ in range(3)]
    for number in range(examples(2, soak=100)):
        random = Random(number)
        await harness.start_runs([random_scenario(random) for _ in range(STORIES)], f"round{number}")
        for _ in range(random.randint(1, 3)):
            await wait_for_progress(harness, random)
            for _ in range(random.randint(1, 3)):
                children.pop(0).kill()
                children.append(FlowWorkerProcess(place))
                campaign.faults += 1
        await wait_for_end(harness, f"round {number}")
        campaign.end_round()
    for child in children:
        child.kill()


async def wait_for_progress(harness: FlowsCrashHarness, random: Random) -> None:
    """Wait until further steps are done, or all."""
    count = harness.count_lines() + random.randint(0, 25)

    async def has_come() -> bool:
        return harness.count_lines() >= count or await harness.is_over()

    await becomes(has_come, "a moment to kill", WITHIN, harness.describe_unended)


async def wait_for_end(harness: FlowsCrashHarness, when: str) -> None:
    """Wait until all runs have ended, and check them."""
    await becomes(harness.is_over, "all runs end", WITHIN, harness.describe_unended)
    try:
        await harness.check()
    except AssertionError as error:
        error.add_note(when)
        raise


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_server_may_die_at_any_time(tmp_path: Path, campaign: Campaign) -> None:
    """F3, F4, F6, F11: `penstock up` is killed, alone or with its PostgreSQL; the next server continues."""
    campaign.counts_items = True
    flows = {"modules": ["tests.flows.scenarios.worker_process"], "lease": 1, "max_lost": 10_000}
    write_config(tmp_path, {"flows": flows})
    data, scenarios = tmp_path / ".penstock", dict[str, RunScenario]()
    environment = {"PYTHONPATH": str(REPOSITORY), DONE: str(data / "done")}
    up = Up(tmp_path, env=environment).__enter__()
    try:
        for number in range(examples(1, soak=100)):
            random = Random(number)
            scenarios |= {f"round{number}.{n}": random_scenario(random) for n in range(STORIES)}
            made = [run_id for run_id in scenarios if run_id.startswith(f"round{number}.")]
            moment = count_lines(data) + random.randint(1, STORIES // 2)  # so much is done of any stories
            for run_id in made[: STORIES // 2]:
                start_run(up, run_id, scenarios[run_id])
            until(lambda: count_lines(data) >= moment, "a moment to kill", WITHIN)  # noqa: B023 - of this round
            kill_server(up, with_postgres=number % 2 == 0)
            up = Up(tmp_path, env=environment).__enter__()
            for run_id in made:  # some of them again, as a client does who was not answered
                start_run(up, run_id, scenarios[run_id])
            async with open_database(data, scenarios) as harness:
                await wait_for_end(harness, f"round {number}")
            campaign.end_round(faults=1)
    finally:
        up.__exit__(None, None, None)


def start_run(up: Up, run_id: str, scenario: RunScenario) -> None:
    answer = httpx.post(f"{up.api}/api/v1/flow_runs", json={"runId": run_id, "steps": scenario.steps}, timeout=30)
    assert answer.status_code in (200, 201), answer.text


def count_lines(data: Path) -> int:
    """Return the number of completed attempts so far."""
    done = data / "done"
    return done.read_bytes().count(b"\n") if done.exists() else 0


def kill_server(up: Up, *, with_postgres: bool) -> None:
    """Kill the server; without PostgreSQL, which notices it and stops."""
    family = psutil.Process(up.pid).children(recursive=True)
    for process in family if with_postgres else []:
        with suppress(psutil.NoSuchProcess):  # it went with one before it
            process.kill()
    up.__exit__(None, None, None)
    psutil.wait_procs(family, 30)


@asynccontextmanager
async def open_database(data: Path, scenarios: dict[str, RunScenario]) -> AsyncIterator[FlowsCrashHarness]:
    """Yield a harness on the database of the server that runs on *data*."""
    async with run_embedded_postgres(data / "postgres") as url, crash_harness(url, data, SECTION) as harness:
        harness.scenarios = scenarios
        yield harness


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_postgresql_may_die_during_work(tmp_path: Path, campaign: Campaign) -> None:
    """F3, F4, F11: PostgreSQL is killed or stopped at once; the workers reconnect, and all runs end."""
    campaign.counts_items = True
    async with run_embedded_postgres(tmp_path / "pg") as url:
        async with Database.open(url, size=1) as db:
            await migrate.migrate(db, list_platform_migrations(Settings()))
        place = WorkerSetup(url, tmp_path, SECTION)
        children = [FlowWorkerProcess(place) for _ in range(2)]
        async with crash_harness(url, tmp_path, SECTION) as harness:
            for number in range(examples(1, soak=50)):
                random = Random(number)
                await harness.start_runs([random_scenario(random) for _ in range(STORIES)], f"round{number}")
                await wait_for_progress(harness, random)
                server = postmaster(tmp_path / "pg")
                server.send_signal((signal.SIGKILL, signal.SIGQUIT)[number % 2])
                psutil.wait_procs([server], 30)
                await wait_for_database(harness)
                await wait_for_end(harness, f"round {number}")
                campaign.end_round(faults=1)
        for child in children:
            child.kill()


def postmaster(folder: Path) -> psutil.Process:
    return psutil.Process(int((folder / "data" / "postmaster.pid").read_text().split()[0]))


async def wait_for_database(harness: FlowsCrashHarness) -> None:
    async def answers() -> bool:
        try:
            await harness.db.check()
        except Transient:
            return False
        return True

    await becomes(answers, "PostgreSQL comes back", WITHIN)


async def test_stopped_worker_completes_or_releases_its_steps(database_url: str, tmp_path: Path) -> None:
    """F11, F17: steps that end within the drain time count; the others are READY at once, without an attempt."""
    short = WorkerSetup(database_url, tmp_path, LONG, drain=timedelta(seconds=1))
    async with crash_harness(database_url, tmp_path, LONG) as harness:
        await harness.start_runs([wait_scenario(tmp_path / name) for name in ("quick", "slow")], "r")
        going = FlowWorkerProcess(short)
        for name in ("quick", "slow"):
            until((tmp_path / f"{name}.started").exists, f"{name} has started")
        going.stop()
        (tmp_path / "quick").touch()
        going.join_stopped()
        states = await harness.read_step_states()
        assert states["r.0", "s"] == ("SUCCEEDED", 1, 1)
        assert states["r.1", "s"] == ("READY", 1, 0)
        (tmp_path / "slow").touch()
        other = FlowWorkerProcess(short)
        await wait_for_end(harness, "all runs have ended")
        assert (await harness.read_step_states())["r.1", "s"] == ("SUCCEEDED", 2, 1)
        other.kill()


def wait_scenario(file: Path) -> RunScenario:
    return RunScenario({"s": {"kind": "wait", "inputs": {"file": str(file)}}})


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_stop_during_work_loses_nothing(database_url: str, tmp_path: Path, campaign: Campaign) -> None:
    """F17: a worker that stops at any time leaves no step that waits for its lease, and counts no attempt."""
    campaign.counts_items = True
    place = WorkerSetup(database_url, tmp_path, LONG)
    async with crash_harness(database_url, tmp_path, LONG) as harness:
        for number in range(examples(2, soak=100)):
            random = Random(number)
            child = FlowWorkerProcess(place)
            scenarios = [chain(8), chain(8), artifact_chain(3), map_over(8), map_over(8, "leave"), nested(chain(3))]
            await harness.start_runs(scenarios, f"round{number}")
            await wait_for_progress(harness, random)
            child.stop()
            child.join_stopped()
            assert [name for name, state in (await harness.read_step_states()).items() if state[0] == "RUNNING"] == []
            child = FlowWorkerProcess(place)
            await wait_for_end(harness, f"round {number}")
            child.kill()
            assert {state[2] for state in (await harness.read_step_states()).values()} == {1}
            campaign.end_round(faults=1)
