"""The acts of the demo, each with what it found out; the same story for `make demo` and `make up`."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from subprocess import Popen
from time import perf_counter
from typing import Any

from examples.demo.place import RAW, WORK, Broken, Place
from examples.demo.sender import arrived

from penstock.flows.client import FlowClient
from penstock.kernel.errors import NotFound
from penstock.overview.client import OverviewClient
from penstock.refdata.sdk import Dictionaries

RECORDS, FAULTS = 8_000, ("--rate-500", "0.05", "--rate-429", "0.02", "--retry-after", "0.2", "--rate-short", "0.05")
EVENTS, SHARDS = 600, 12
FLOW, RUN, TENANT, FILE = "morning", "morning-1", "acme", "events"
_LOOK, _WITHIN = 0.05, 90  # seconds
Say = Callable[[str], None]
Json = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """What was promised, what was found, and whether the one is the other."""

    part: str
    promise: str
    detail: str
    held: bool


@dataclass
class Story:
    """Everything the acts share."""

    place: Place
    say: Say
    ports: tuple[int, int, int]  # of the API, of the query server, of the source; 0 takes a free one
    api: str = ""
    query: str = ""
    server: "Popen[str] | None" = None
    found: list[Found] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)

    async def tell(self) -> None:
        """The whole story."""
        source = await self._act("a diamond exchange opens: a paged API that fails now and then", self._open_source)
        self.place.furnish(source)
        await self._act("penstock up: PostgreSQL comes from a wheel, all five parts in one place", self._start)
        await self._act(
            "files arrive, a flow takes in all there is; a process full of daemons is killed", self._morning
        )
        await self._act("a reader writes, and reads what it wrote by its version", self._read_own_write)
        await self._act("kill -9 of the whole server, and the same command again", self._survive)
        await self._act("penstock status: what is late or broken, and what to do about it", self._ask_status)

    async def _act(self, what: str, act: Callable[[], Awaitable[Any]]) -> Any:
        self.say(f"{len(self.took) + 1}. {what}")
        began = perf_counter()
        told = await act()
        self.took[what] = perf_counter() - began
        return told

    def _note(self, part: str, promise: str, detail: str, held: bool) -> None:
        self.found.append(Found(part, promise, detail, held))
        self.say(f"   {'ok  ' if held else 'FAIL'}  {part}: {detail}")

    async def _open_source(self) -> str:
        _, told = self.place.penstock(
            "harvest", "source", "--records", str(RECORDS), "--port", str(self.ports[2]), *FAULTS
        )
        return str(told["api"])

    async def _start(self) -> None:
        began = perf_counter()
        api, query, _ = self.ports
        self.server, told = self.place.penstock("up", "--port", str(api), "--query-port", str(query))
        self.api, self.query = told["api"], told["query"]
        self.place.expect_suppliers(self.api)
        self._note("platform", "it runs with nothing installed", f"ready in {perf_counter() - began:.1f} s", True)

    async def _morning(self) -> None:
        self.place.deliver("azimut", "azimut.xlsx")
        self.place.deliver("polaris", "polaris.csv")
        self.place.drop_events(FILE, made_events())
        async with FlowClient(self.api) as flows:
            await flows.create({"runId": RUN, "flow": FLOW})
            await self._events_with_a_death()
            run = await until(lambda: flows.run(RUN), lambda run: run["finishedAt"], f"run {RUN} has ended")
            charts = await self._keep_charts(flows, run)
        await self._judge(run, charts)

    async def _events_with_a_death(self) -> None:
        """Kill the daemons as soon as the first shard has arrived; start them again."""
        daemons = self._start_daemons()
        async with OverviewClient(self.api) as overview:
            async for event in overview.events(parts=["tracking"], last=1_000):
                if (event["machine"], event["to"]) == ("tracking.mysql-sender", "done"):
                    break
        self.place.kill(daemons)
        self._start_daemons()

    def _start_daemons(self) -> "Popen[str]":
        folder = self.place.folder
        given = (self.api, str(folder / RAW), str(folder / WORK), str(SHARDS))
        return self.place.start("examples.demo.daemons", *given)

    async def _keep_charts(self, flows: FlowClient, run: Json) -> list[Path]:
        """The pictures the flow drew, where a person finds them."""
        step = run["steps"]["charts"]
        folder = self.place.folder / "charts"
        folder.mkdir(exist_ok=True)
        kept = []
        for artifact in step.get("artifacts") or ():
            if (name := artifact["name"]).endswith((".png", ".svg")):
                (folder / Path(name).name).write_bytes(await flows.read(RUN, "charts", name))
                kept.append(folder / Path(name).name)
        return kept

    async def _judge(self, run: Json, charts: list[Path]) -> None:
        steps = run["steps"]
        await self._judge_suppliers(steps["tyres"], steps["broken-prices"])
        records = (steps["diamonds"]["outputs"] or {}).get("records", 0)
        items = await self._dictionary("DIAMONDS")
        served = f"served as DIAMONDS version {self.versions['DIAMONDS']}"
        detail = f"{records:,} records in spite of 500s, 429s and short pages, {served}"
        self._note("harvest", "nothing of a feed is lost or doubled", detail, len(items) == records == RECORDS)
        self._judge_events()
        detail = f"{run['status']} in {seconds_of(run):.1f} s, with {len(charts)} charts and a report"
        is_whole = run["status"] == "SUCCEEDED" and len(charts) == 2
        self._note("flows", "one run over all parts", detail, is_whole)

    async def _judge_suppliers(self, tyres: Json, prices: Json) -> None:
        published = (tyres["outputs"] or {}).get("published", 0)
        items = await self._dictionary("TYRES")
        detail = f"azimut.xlsx published: {published} rows, served as TYRES version {self.versions['TYRES']}"
        self._note("ingest", "a good file becomes a dictionary", detail, len(items) == published > 0)
        error = prices["error"] or {}
        detail = f"polaris.csv rejected: {error.get('code')}, {error.get('message', '').partition(': ')[2]}"
        is_out = (prices["status"], error.get("code")) == ("SKIPPED", "DQ_TOO_MANY_BAD_ROWS")
        self._note("ingest", "a bad file publishes nothing, and says why", detail, is_out)

    def _judge_events(self) -> None:
        there = arrived(self.place.folder / WORK, SHARDS)
        wanted = sorted(event["event_id"] for event in made_events())
        detail = f"{len(there)} of {EVENTS} events in {SHARDS} shards, each once, though their daemons were killed"
        self._note("tracking", "each event arrives exactly once", detail, there == wanted)

    async def _dictionary(self, code: str) -> Mapping[str, Any]:
        """All items of a dictionary, from a pod's memory."""
        async with self._dictionaries() as dictionaries:

            async def whole() -> dict[str, Any]:
                try:
                    return {key: item async for key, item in dictionaries.all(code)}
                except NotFound:  # its first version is on its way
                    return {}

            items: Mapping[str, Any] = await until(whole, bool, f"{code} is served")
            self.versions[code] = await dictionaries.version(code)
        return items

    async def _read_own_write(self) -> None:
        async with self._dictionaries() as dictionaries:
            began = perf_counter()
            version = await dictionaries.put("RATES", {"EUR": {"rate": "1.0851"}})
            read = await dictionaries.get("RATES", "EUR")
            took = (perf_counter() - began) * 1000
        self.versions["RATES"] = version
        detail = f"RATES version {version} written and read back in {took:.0f} ms"
        self._note("refdata", "a reader sees its own write", detail, read == {"rate": "1.0851"})

    async def _survive(self) -> None:
        assert self.server is not None
        before = dict(self.versions)
        self.place.kill(self.server)
        began = perf_counter()
        port = self.api.rpartition(":")[2], self.query.rpartition(":")[2]
        self.server, _ = self.place.penstock("up", "--port", port[0], "--query-port", port[1])
        async with self._dictionaries() as dictionaries:
            after = {code: await dictionaries.version(code) for code in before}
            rate = await dictionaries.get("RATES", "EUR")
        detail = f"back in {perf_counter() - began:.1f} s, with every version it had: " + ", ".join(
            f"{code} {version}" for code, version in sorted(after.items())
        )
        self._note("platform", "kill -9 loses nothing", detail, after == before and rate == {"rate": "1.0851"})

    async def _ask_status(self) -> None:
        async with OverviewClient(self.api) as overview:
            status = await overview.status()
        wrong = [(part["part"], one) for part in status["parts"] for one in part["findings"]]
        for part, one in wrong:
            self.say(f"   {one['severity']}  {part}  {one['subject']}: {one['what']}")
            self.say(f"           → {one['hint']}")
        detail = f"{len(wrong)} finding: the supplier whose file was rejected"
        is_right = [(part, one["subject"]) for part, one in wrong] == [("ingest", "polaris")]
        self._note("overview", "always an answer to what is wrong", detail, is_right)

    @asynccontextmanager
    async def _dictionaries(self) -> AsyncIterator[Dictionaries]:
        async with Dictionaries(self.api, self.query, TENANT, versions=self.versions) as dictionaries:
            yield dictionaries


def made_events() -> list[Json]:
    """The events of the morning: always the same."""
    chance = random.Random(3)
    return [
        {
            "event_id": f"e-{number:04d}",
            "user_id": f"u-{chance.randrange(200)}",
            "kind": chance.choice(["order", "refund", "visit"]),
            "amount_cents": chance.randrange(50_000),
            "at": f"2026-11-17T0{chance.randrange(6)}:{chance.randrange(60):02d}:00+03:00",
        }
        for number in range(EVENTS)
    ]


async def until(look: Callable[[], Awaitable[Any]], is_so: Callable[[Any], Any], what: str) -> Any:
    """What *look* finds, once it is so; Broken when that takes too long."""
    try:
        async with asyncio.timeout(_WITHIN):
            while not is_so(found := await look()):  # noqa: ASYNC110 - another process makes it so
                await asyncio.sleep(_LOOK)
            return found
    except TimeoutError:
        raise Broken(f"waited {_WITHIN} s until {what}") from None


def seconds_of(run: Json) -> float:
    """How long a run took."""
    began, finished = (datetime.fromisoformat(run[name]) for name in ("startedAt", "finishedAt"))
    return (finished - began).total_seconds()
