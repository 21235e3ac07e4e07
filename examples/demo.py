"""What Penstock promises, shown on a fresh machine: nothing lost, nothing doubled, and always an answer to "why".

Starts `penstock up` in a temporary folder, puts work on the bus, kills a worker in mid-batch and then the whole server,
and counts at the end. It ends by itself, with exit code 0 if and only if every promise held.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from time import perf_counter
from typing import Any

from penstock.app import open_database
from penstock.kernel.bus import Delivering, Delivery, Message
from penstock.kernel.bus.postgres import PostgresBus
from penstock.kernel.db import Database
from penstock.kernel.errors import Invalid
from penstock.kernel.outcome import Done, Outcome
from penstock.kernel.telemetry import Telemetry, configure_logging
from penstock.kernel.worker import Worker, each
from penstock.settings import load_settings

ORDERS = 2_000
BATCH = 100
TOPIC = "demo.orders"
COUNTS = """
SELECT count(*) FILTER (WHERE number < $1), count(*) FILTER (WHERE number >= $1), coalesce(sum(handled - 1), 0)
FROM shipped
"""
DELIVERING = Delivering(max_attempts=3, lease_for=timedelta(seconds=2))


def main() -> int:
    configure_logging("ERROR", "console")
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as name:
        findings = asyncio.run(tell_the_story(Path(name)))
    width = max(len(finding) for finding, _, _ in findings)
    say("\nwhat happened")
    for finding, detail, held in findings:
        say(f"  {'ok  ' if held else 'FAIL'}  {finding.ljust(width)}  {detail}")
    say("\nnext: `make up` keeps it running, `penstock doctor` looks at this machine, README.md says what is there")
    return 0 if all(held for _, _, held in findings) else 1


async def tell_the_story(folder: Path) -> list[tuple[str, str, bool]]:
    findings = []
    began = perf_counter()
    say("1. penstock up, on nothing but Python: PostgreSQL comes from a wheel")
    with up(folder) as ready:
        health = ask(f"{ready['api']}/actuator/health")
        detail = f"in {perf_counter() - began:.1f} s, health {health['status']}, API at {ready['api']}"
        findings.append(("up is ready", detail, health["status"] == "UP"))
        async with open_database(load_settings(None, {}, {"data_dir": folder / "data"})) as db:
            findings += await work_and_kill(db)
        say("4. kill -9 of the whole server, and the same command again")
        os.kill(ready["pid"], signal.SIGKILL)
    with up(folder):
        async with open_database(load_settings(None, {}, {"data_dir": folder / "data"})) as db:
            kept = await db.fetchval("SELECT count(*) FROM shipped")
    findings.append(("the data survived kill -9", f"{kept:,} of {ORDERS:,} orders", kept == ORDERS))
    return findings


async def work_and_kill(db: Database) -> list[tuple[str, str, bool]]:
    bus = PostgresBus(db)
    await db.execute("CREATE TABLE shipped (number int PRIMARY KEY, worker text NOT NULL, handled int NOT NULL)")
    say(f"2. {ORDERS:,} orders and one piece of rubbish go on the bus in a transaction; another one is rolled back")
    await publish(db, bus)
    say("3. a worker is killed with kill -9 in mid-batch; another one takes over when its lease has run out")
    killed_at = await asyncio.to_thread(start_and_kill, db.dsn)
    began = perf_counter()
    await finish(db, bus)
    seconds = perf_counter() - began
    wanted, ghosts, again = await db.fetchrow(COUNTS, ORDERS) or (0, 0, 0)
    both = await db.fetch("SELECT worker, count(*) AS orders FROM shipped GROUP BY worker ORDER BY worker")
    shares = ", ".join(f"{row['worker']} shipped {row['orders']:,}" for row in both)
    dead, left = await bus.dead_letters(TOPIC), await bus.backlog(TOPIC)
    killed = f"killed after {killed_at} orders, all done {seconds:.1f} s later"
    # Only what was out at the moment of death may be handled once more; settled work never is.
    return [
        ("rolled back means never sent", f"{ghosts} of the 100 that were rolled back", ghosts == 0),
        ("a killed worker loses nothing", killed, wanted == ORDERS and len(both) == 2),
        ("nothing is doubled", f"{shares}; {again} handled again, shipped once", again <= BATCH),
        ("rubbish is set aside with its reason", dead[0].reason if dead else "nothing was set aside", len(dead) == 1),
        ("nothing waits any more", f"{left} messages left", left == 0),
    ]


async def publish(db: Database, bus: PostgresBus) -> None:
    orders = [Message(TOPIC, f"customer-{n % 50}", json.dumps({"number": n}).encode()) for n in range(ORDERS)]
    async with db.transaction() as tx:
        await bus.publish([*orders, Message(TOPIC, "customer-7", b"rubbish")], tx=tx)
    try:
        async with db.transaction() as tx:
            never = [Message(TOPIC, "ghost", json.dumps({"number": ORDERS + n}).encode()) for n in range(100)]
            await bus.publish(never, tx=tx)
            raise InterruptedError("changed our mind")  # noqa: TRY301 - what the story is about
    except InterruptedError:
        pass


def start_and_kill(dsn: str) -> int:
    """Run a worker in a process of its own, and kill it in the middle of a batch."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=be_a_worker, args=(dsn, theirs))
    process.start()
    count = 0
    while count < ORDERS // 4:
        count = ours.recv()
    process.kill()
    process.join()
    return count


def be_a_worker(dsn: str, pipe: Pipe) -> None:
    async def work() -> None:
        async with Database.open(dsn) as db:
            await ship(db, PostgresBus(db), "worker-a", pipe)

    asyncio.run(work())


async def finish(db: Database, bus: PostgresBus) -> None:
    """Work until the topic is empty; what the dead worker held comes free when its lease has run out."""
    while await bus.backlog(TOPIC):
        await ship(db, bus, "worker-b", None)


async def ship(db: Database, bus: PostgresBus, worker: str, pipe: Pipe | None) -> None:
    async with bus.subscribe(TOPIC, worker=worker, delivering=DELIVERING) as queue:
        done = 0

        async def handle(delivery: Delivery) -> Outcome:
            nonlocal done
            # The number is the key: a message handled twice still ships once.
            query = (
                "INSERT INTO shipped (number, worker, handled) VALUES ($1, $2, 1)"
                " ON CONFLICT (number) DO UPDATE SET handled = shipped.handled + 1"
            )
            await db.execute(query, number_of(delivery.message), worker)
            done += 1
            if pipe is not None:
                pipe.send(done)
            return Done()

        await queue.wait(2)
        await Worker(queue, each(handle, queue, concurrency=4), Telemetry(), batch=BATCH).drain()


def number_of(message: Message) -> int:
    try:
        return int(json.loads(message.value)["number"])
    except ValueError as error:
        raise Invalid("NOT_AN_ORDER", f"this is no order: {message.value!r}") from error


@contextmanager
def up(folder: Path) -> Iterator[dict[str, Any]]:
    """`penstock up` as anyone would run it; yields what it says when it is ready."""
    command = [sys.executable, "-m", "penstock.cli.main", "up", "--json", "--port", "0", "--query-port", "0"]
    with (folder / "up.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, "--data-dir", str(folder / "data")], stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert process.stdout is not None
    try:
        text = ""
        for line in process.stdout:
            text += line
            if line.startswith("}"):
                break
        if not text:
            sys.exit(f"penstock up did not start: {(folder / 'up.log').read_text()}")
        yield json.loads(text)
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def ask(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
