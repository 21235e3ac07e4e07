"""The steps of the demo, in order, and the result of each check."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from signal import SIGKILL
from subprocess import Popen
from time import perf_counter
from typing import Any

from penstock.demo.event_files import make_events
from penstock.demo.sender import list_sent_events
from penstock.demo.workspace import RAW, WORK, DemoFailed, DemoWorkspace
from penstock.flows.client import FlowClient
from penstock.kernel.errors import NotFound
from penstock.overview.client import OverviewClient
from penstock.refdata.sdk import Dictionaries

RECORDS, FAULTS = 8_000, ("--rate-500", "0.05", "--rate-429", "0.02", "--retry-after", "0.2", "--rate-short", "0.05")
EVENTS, SHARDS = 600, 12
FLOW, RUN, TENANT, FILE = "morning", "morning-1", "acme", "events"
_POLL_SECONDS, _TIMEOUT_SECONDS = 0.05, 90
Report = Callable[[str], None]
Json = dict[str, Any]


@dataclass(frozen=True)
class CheckedPromise:
    """A promise of a part, and the result of its check."""

    part: str
    promise: str
    detail: str
    passed: bool


@dataclass
class DemoScenario:
    """A run of the demo; *report* is called with each line of progress."""

    workspace: DemoWorkspace
    report: Report
    ports: tuple[int, int, int]  # of the API, of the query server, of the source; 0 takes a free one
    api: str = ""
    query: str = ""
    server: "Popen[str] | None" = None
    promises: list[CheckedPromise] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=dict)
    steps: int = 0

    @property
    def has_passed(self) -> bool:
        """True if every check has passed."""
        return all(promise.passed for promise in self.promises)

    async def run(self) -> None:
        """Run all steps; DemoFailed if one of them cannot be finished."""
        source = await self._run_step(
            "a diamond exchange opens: a paged API that fails periodically", self._start_source
        )
        self.workspace.write_configuration(source)
        await self._run_step("penstock up: all five parts in one process, with its own PostgreSQL", self._start_parts)
        await self._run_step(
            "files arrive, a flow processes all of them; the process of the daemons is killed", self._run_flow
        )
        await self._run_step("a client writes a rate, and reads it back by its version", self._read_own_write)
        await self._run_step("kill -9 of the whole server, and the same command again", self._restart_after_kill)
        await self._run_step("penstock status: what is late or broken, and how to fix it", self._ask_status)

    async def _run_step(self, title: str, step: Callable[[], Awaitable[Any]]) -> Any:
        self.steps += 1
        self.report(f"{self.steps}. {title}")
        return await step()

    def _add_promise(self, part: str, promise: str, detail: str, passed: bool) -> None:
        self.promises.append(CheckedPromise(part, promise, detail, passed))
        self.report(f"   {'ok  ' if passed else 'FAIL'}  {part}: {detail}")

    async def _start_source(self) -> str:
        _, ready = self.workspace.start_penstock(
            "harvest", "source", "--records", str(RECORDS), "--port", str(self.ports[2]), *FAULTS
        )
        return str(ready["api"])

    async def _start_parts(self) -> None:
        started_at = perf_counter()
        api, query, _ = self.ports
        self.server, ready = self._start_server(str(api), str(query))
        self.api, self.query = ready["api"], ready["query"]
        self.workspace.write_suppliers(self.api)
        detail = f"ready in {perf_counter() - started_at:.1f} s"
        self._add_promise("platform", "it runs with nothing installed", detail, passed=True)

    def _start_server(self, api: str, query: str) -> "tuple[Popen[str], Json]":
        return self.workspace.start_penstock("up", "--port", api, "--query-port", query)

    async def _run_flow(self) -> None:
        self.workspace.deliver_file("azimut", "azimut.xlsx")
        self.workspace.deliver_file("polaris", "polaris.csv")
        self.workspace.deliver_events(FILE, make_events(EVENTS))
        async with FlowClient(self.api) as flows:
            await flows.create({"runId": RUN, "flow": FLOW})
            await self._kill_daemons_at_work()
            run = await wait_until(lambda: flows.run(RUN), lambda run: run["finishedAt"], f"run {RUN} has ended")
            charts = await self._save_charts(flows, run)
        await self._check_run(run, charts)

    async def _kill_daemons_at_work(self) -> None:
        """Kill the daemons as soon as the first shard was sent; start them again."""
        daemons = self._start_daemons()
        async with OverviewClient(self.api) as overview, limit_wait("a shard is sent"):
            async for event in overview.events(parts=["tracking"], last=1_000):
                if (event["machine"], event["to"]) == ("tracking.mysql-sender", "done"):
                    break
        self.workspace.end_process(daemons, SIGKILL)
        self._start_daemons()

    def _start_daemons(self) -> "Popen[str]":
        folder = self.workspace.folder
        arguments = (self.api, str(folder / RAW), str(folder / WORK), str(SHARDS))
        return self.workspace.start("penstock.demo.daemons", *arguments)

    async def _save_charts(self, flows: FlowClient, run: Json) -> list[Path]:
        """Save the charts of the flow in the folder; return their paths."""
        step = run["steps"]["charts"]
        folder = self.workspace.folder / "charts"
        folder.mkdir(exist_ok=True)
        saved = []
        for artifact in step.get("artifacts") or ():
            if (name := artifact["name"]).endswith((".png", ".svg")):
                (folder / Path(name).name).write_bytes(await flows.read(RUN, "charts", name))
                saved.append(folder / Path(name).name)
        return saved

    async def _check_run(self, run: Json, charts: list[Path]) -> None:
        steps = run["steps"]
        await self._check_suppliers(steps["tyres"], steps["broken-prices"])
        records = (steps["diamonds"]["outputs"] or {}).get("records", 0)
        items = await self._read_dictionary("DIAMONDS")
        served = f"served as DIAMONDS version {self.versions['DIAMONDS']}"
        detail = f"{records:,} records despite 500s, 429s and short pages, {served}"
        self._add_promise(
            "harvest", "no record of a feed is lost or duplicated", detail, len(items) == records == RECORDS
        )
        self._check_events()
        detail = f"{run['status']} in {measure_run(run):.1f} s, with {len(charts)} charts and a report"
        is_complete = run["status"] == "SUCCEEDED" and len(charts) == 2
        self._add_promise("flows", "one run uses all parts", detail, is_complete)

    async def _check_suppliers(self, tyres: Json, prices: Json) -> None:
        published = (tyres["outputs"] or {}).get("published", 0)
        items = await self._read_dictionary("TYRES")
        detail = f"azimut.xlsx published: {published} rows, served as TYRES version {self.versions['TYRES']}"
        self._add_promise("ingest", "a good file becomes a dictionary", detail, len(items) == published > 0)
        error = prices["error"] or {}
        detail = f"polaris.csv rejected: {error.get('code')}, {error.get('message', '').partition(': ')[2]}"
        is_rejected = (prices["status"], error.get("code")) == ("SKIPPED", "DQ_TOO_MANY_BAD_ROWS")
        self._add_promise("ingest", "a bad file is rejected, with the reason", detail, is_rejected)

    def _check_events(self) -> None:
        sent = list_sent_events(self.workspace.folder / WORK, SHARDS)
        expected = sorted(event["event_id"] for event in make_events(EVENTS))
        detail = f"{len(sent)} of {EVENTS} events in {SHARDS} shards, each once, although their daemons were killed"
        self._add_promise("tracking", "each event arrives exactly once", detail, sent == expected)

    async def _read_dictionary(self, code: str) -> Mapping[str, Any]:
        """Return all items of a dictionary, read from the query server."""
        async with self._open_dictionaries() as dictionaries:

            async def read_items() -> dict[str, Any]:
                try:
                    return {key: item async for key, item in dictionaries.all(code)}
                except NotFound:  # its first version is not published yet
                    return {}

            items: Mapping[str, Any] = await wait_until(read_items, bool, f"{code} is served")
            self.versions[code] = await dictionaries.version(code)
        return items

    async def _read_own_write(self) -> None:
        async with self._open_dictionaries() as dictionaries:
            started_at = perf_counter()
            version = await dictionaries.put("RATES", {"EUR": {"rate": "1.0851"}})
            read = await dictionaries.get("RATES", "EUR")
            milliseconds = (perf_counter() - started_at) * 1000
        self.versions["RATES"] = version
        detail = f"RATES version {version} written and read back in {milliseconds:.0f} ms"
        self._add_promise("refdata", "a client reads its own write", detail, read == {"rate": "1.0851"})

    async def _restart_after_kill(self) -> None:
        before = dict(self.versions)
        if self.server is not None:
            self.workspace.end_process(self.server, SIGKILL)
        started_at = perf_counter()
        self.server, _ = self._start_server(self.api.rpartition(":")[2], self.query.rpartition(":")[2])
        async with self._open_dictionaries() as dictionaries:
            after = {code: await dictionaries.version(code) for code in before}
            rate = await dictionaries.get("RATES", "EUR")
        detail = f"restarted in {perf_counter() - started_at:.1f} s, with every version: " + ", ".join(
            f"{code} {version}" for code, version in sorted(after.items())
        )
        self._add_promise("platform", "kill -9 loses nothing", detail, after == before and rate == {"rate": "1.0851"})

    async def _ask_status(self) -> None:
        async with OverviewClient(self.api) as overview:
            status = await overview.status()
        issues = [(part["part"], issue) for part in status["parts"] for issue in part["issues"]]
        for part, issue in issues:
            self.report(f"   {issue['severity']}  {part}  {issue['subject']}: {issue['problem']}")
            self.report(f"           → {issue['hint']}")
        detail = f"{len(issues)} issue: the supplier whose file was rejected"
        is_expected = [(part, issue["subject"]) for part, issue in issues] == [("ingest", "polaris")]
        self._add_promise("overview", "status names every problem and its fix", detail, is_expected)

    @asynccontextmanager
    async def _open_dictionaries(self) -> AsyncIterator[Dictionaries]:
        async with Dictionaries(self.api, self.query, TENANT, versions=self.versions) as dictionaries:
            yield dictionaries


async def wait_until(read_value: Callable[[], Awaitable[Any]], is_accepted: Callable[[Any], Any], goal: str) -> Any:
    """Return the result of *read_value* once *is_accepted* accepts it; DemoFailed if that takes too long."""
    async with limit_wait(goal):
        while not is_accepted(value := await read_value()):  # noqa: ASYNC110 - the value is of another process
            await asyncio.sleep(_POLL_SECONDS)
        return value


@asynccontextmanager
async def limit_wait(goal: str) -> AsyncIterator[None]:
    """Raise DemoFailed if the body takes too long; *goal* is the awaited condition."""
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            yield
    except TimeoutError:
        raise DemoFailed(f"waited {_TIMEOUT_SECONDS} s until {goal}") from None


def measure_run(run: Json) -> float:
    """Return the duration of a run in seconds."""
    started_at, finished_at = (datetime.fromisoformat(run[name]) for name in ("startedAt", "finishedAt"))
    return (finished_at - started_at).total_seconds()
