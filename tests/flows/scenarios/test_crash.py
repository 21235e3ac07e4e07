"""kill -9 of workers, of servers and of PostgreSQL, at any moment: nothing is lost, nothing counts twice."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from random import Random

import httpx
import psutil
import pytest

from penstock.app.schema import platform_migrations
from penstock.kernel.db import migrate
from penstock.kernel.db.database import Database
from penstock.kernel.db.embedded import embedded_postgres
from penstock.kernel.errors import Transient
from penstock.settings import Settings
from tests.flows.scenarios.crash_scenarios import (
    FlowsCrashHarness,
    RunScenario,
    chain,
    crash_harness,
    leaving,
    mapped,
    some_story,
    within,
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
async def test_workers_may_die_at_any_moment(
    harness: FlowsCrashHarness, database_url: str, tmp_path: Path, campaign: Campaign
) -> None:
    """F3, F4, F6, F11: some of three processes are killed, round after round, with runs of all kinds under way."""
    campaign.counts_items = True
    place = WorkerSetup(database_url, tmp_path, SECTION)
    children = [FlowWorkerProcess(place) for _ in range(3)]
    for number in range(examples(2, soak=100)):
        random = Random(number)
        await harness.tell([some_story(random) for _ in range(STORIES)], f"round{number}")
        for _ in range(random.randint(1, 3)):
            await some_moment(harness, random)
            for _ in range(random.randint(1, 3)):
                children.pop(0).kill()
                children.append(FlowWorkerProcess(place))
                campaign.faults += 1
        await ended(harness, f"round {number}")
        campaign.end_round()
    for child in children:
        child.kill()


async def some_moment(harness: FlowsCrashHarness, random: Random) -> None:
    """Wait until some more has been done, or all."""
    count = harness.lines() + random.randint(0, 25)

    async def has_come() -> bool:
        return harness.lines() >= count or await harness.is_over()

    await becomes(has_come, "a moment to kill", WITHIN, harness.explained)


async def ended(harness: FlowsCrashHarness, when: str) -> None:
    """All is over, and as it should be."""
    await becomes(harness.is_over, "all runs end", WITHIN, harness.explained)
    try:
        await harness.check()
    except AssertionError as error:
        error.add_note(when)
        raise


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_the_whole_server_may_die_at_any_moment(tmp_path: Path, campaign: Campaign) -> None:
    """F3, F4, F6, F11: `penstock up` is killed, alone or with its PostgreSQL; the next one goes on."""
    campaign.counts_items = True
    flows = {"modules": ["tests.flows.scenarios.worker_process"], "lease": 1, "max_lost": 10_000}
    write_config(tmp_path, {"flows": flows})
    data, stories = tmp_path / ".penstock", dict[str, RunScenario]()
    environment = {"PYTHONPATH": str(REPOSITORY), DONE: str(data / "done")}
    up = Up(tmp_path, env=environment).__enter__()
    try:
        for number in range(examples(1, soak=100)):
            random = Random(number)
            stories |= {f"round{number}.{n}": some_story(random) for n in range(STORIES)}
            made = [run_id for run_id in stories if run_id.startswith(f"round{number}.")]
            moment = lines(data) + random.randint(1, STORIES // 2)  # so much is done of any stories
            for run_id in made[: STORIES // 2]:
                post(up, run_id, stories[run_id])
            until(lambda: lines(data) >= moment, "a moment to kill", WITHIN)  # noqa: B023 - of this round
            kill(up, with_postgres=number % 2 == 0)
            up = Up(tmp_path, env=environment).__enter__()
            for run_id in made:  # some of them again, as a client does who was not answered
                post(up, run_id, stories[run_id])
            async with looked_at(data, stories) as harness:
                await ended(harness, f"round {number}")
            campaign.end_round(faults=1)
    finally:
        up.__exit__(None, None, None)


def post(up: Up, run_id: str, story: RunScenario) -> None:
    answer = httpx.post(f"{up.api}/api/v1/flow_runs", json={"runId": run_id, "steps": story.steps}, timeout=30)
    assert answer.status_code in (200, 201), answer.text


def lines(data: Path) -> int:
    """How much has been done so far."""
    done = data / "done"
    return done.read_bytes().count(b"\n") if done.exists() else 0


def kill(up: Up, *, with_postgres: bool) -> None:
    """Without PostgreSQL: it notices, and ends by itself."""
    family = psutil.Process(up.pid).children(recursive=True)
    for process in family if with_postgres else []:
        with suppress(psutil.NoSuchProcess):  # it went with one before it
            process.kill()
    up.__exit__(None, None, None)
    psutil.wait_procs(family, 30)


@asynccontextmanager
async def looked_at(data: Path, stories: dict[str, RunScenario]) -> AsyncIterator[FlowsCrashHarness]:
    """What the server that runs on *data* has in its database."""
    async with embedded_postgres(data / "postgres") as url, crash_harness(url, data, SECTION) as harness:
        harness.stories = stories
        yield harness


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_postgresql_may_die_while_workers_work(tmp_path: Path, campaign: Campaign) -> None:
    """F3, F4, F11: killed or told to end at once; workers come back by themselves, and everything ends."""
    campaign.counts_items = True
    async with embedded_postgres(tmp_path / "pg") as url:
        async with Database.open(url, size=1) as db:
            await migrate.migrate(db, platform_migrations(Settings()))
        place = WorkerSetup(url, tmp_path, SECTION)
        children = [FlowWorkerProcess(place) for _ in range(2)]
        async with crash_harness(url, tmp_path, SECTION) as harness:
            for number in range(examples(1, soak=50)):
                random = Random(number)
                await harness.tell([some_story(random) for _ in range(STORIES)], f"round{number}")
                await some_moment(harness, random)
                server = postmaster(tmp_path / "pg")
                server.send_signal((signal.SIGKILL, signal.SIGQUIT)[number % 2])
                psutil.wait_procs([server], 30)
                await came_back(harness)
                await ended(harness, f"round {number}")
                campaign.end_round(faults=1)
        for child in children:
            child.kill()


def postmaster(folder: Path) -> psutil.Process:
    return psutil.Process(int((folder / "data" / "postmaster.pid").read_text().split()[0]))


async def came_back(harness: FlowsCrashHarness) -> None:
    async def answers() -> bool:
        try:
            await harness.db.check()
        except Transient:
            return False
        return True

    await becomes(answers, "PostgreSQL comes back", WITHIN)


async def test_who_is_told_to_go_ends_what_it_can_and_gives_back_the_rest(database_url: str, tmp_path: Path) -> None:
    """F11, F17: what ends within the drain counts; the rest costs no attempt, and another has it at once."""
    short = WorkerSetup(database_url, tmp_path, LONG, drain=timedelta(seconds=1))
    async with crash_harness(database_url, tmp_path, LONG) as harness:
        await harness.tell([waiting(tmp_path / name) for name in ("quick", "slow")], "r")
        going = FlowWorkerProcess(short)
        for name in ("quick", "slow"):
            until((tmp_path / f"{name}.begun").exists, f"{name} is begun")
        going.stop()
        (tmp_path / "quick").touch()
        going.join_stopped()
        standing = await harness.set_gauges()
        assert standing["r.0", "s"] == ("SUCCEEDED", 1, 1)
        assert standing["r.1", "s"] == ("READY", 1, 0)
        (tmp_path / "slow").touch()
        other = FlowWorkerProcess(short)
        await ended(harness, "all is done")
        assert (await harness.set_gauges())["r.1", "s"] == ("SUCCEEDED", 2, 1)
        other.kill()


def waiting(file: Path) -> RunScenario:
    return RunScenario({"s": {"kind": "wait", "inputs": {"file": str(file)}}})


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_who_is_told_to_go_in_the_midst_loses_nothing(
    database_url: str, tmp_path: Path, campaign: Campaign
) -> None:
    """F17: told to go at any moment, a worker leaves no step that must wait for its lease, and costs no attempt."""
    campaign.counts_items = True
    place = WorkerSetup(database_url, tmp_path, LONG)
    async with crash_harness(database_url, tmp_path, LONG) as harness:
        for number in range(examples(2, soak=100)):
            random = Random(number)
            child = FlowWorkerProcess(place)
            stories = [chain(8), chain(8), leaving(3), mapped(8), mapped(8, "leave"), within(chain(3))]
            await harness.tell(stories, f"round{number}")
            await some_moment(harness, random)
            child.stop()
            child.join_stopped()
            assert [name for name, one in (await harness.set_gauges()).items() if one[0] == "RUNNING"] == []
            child = FlowWorkerProcess(place)
            await ended(harness, f"round {number}")
            child.kill()
            assert {one[2] for one in (await harness.set_gauges()).values()} == {1}
            campaign.end_round(faults=1)
