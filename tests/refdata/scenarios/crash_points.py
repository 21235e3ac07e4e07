"""The program with crash points: on a test's order it kills or freezes itself at a chosen point.

`CRASH_ORDER` names a file. When it says `{"at": point, "nth": n, "how": "SIGKILL"}`, the n-th passage of that point is
the last. The points are put around the product's functions from here; the product knows nothing of them.
"""

import functools
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import asyncpg
from asyncpg.transaction import Transaction

import penstock.app.programs  # noqa: F401 - loaded before the fork, not after it
from penstock.cli import main
from penstock.kernel.bus import postgres as postgres_bus
from penstock.kernel.bus.kafka import KafkaBus
from penstock.kernel.bus.kafka.subscription import KafkaSubscription
from penstock.kernel.bus.postgres import PostgresBus, PostgresSubscription
from penstock.kernel.db.outbox import Outbox
from penstock.refdata import store
from penstock.refdata.apply import snapshot_store
from penstock.refdata.apply.applier import CommandApplier
from penstock.refdata.apply.relay import OutboxRelay
from penstock.refdata.dictionaries.provider import ItemTableProvider, PostgresSqlProvider

ORDER = "CRASH_ORDER"
SENDING = ("opening", "opened", "published")
ADAPTING = ("taken", "opening", "opened", "published", "settling", "settled")
CHANGING = ("taken", "locked", "noted", "changed", "written", "committed", "applied", "settling", "settled")
REPLACING = ("staged", "replaced", "closed")
REFUSING = ("refusing", "refused")
SWEEPING = ("looked", "published")
RELAYING = ("announcing", "announced", "marked", "relayed")
Act = Callable[..., Awaitable[Any]]


def order(file: Path, point: str, nth: int = 1, how: signal.Signals = signal.SIGKILL) -> None:
    """Order the process with *file* to end or stop at the *nth* pass of *point*."""
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps({"at": point, "nth": nth, "how": how.name}))
    draft.rename(file)


def run(arguments: Sequence[str], folder: Path, order_file: Path, output: Pipe) -> None:
    """Run the program in *folder*, with its log beside the order file and its output in *output*."""
    for name in [name for name in os.environ if name.startswith("PENSTOCK")]:
        del os.environ[name]
    os.environ[ORDER] = str(order_file)
    os.chdir(folder)
    log = os.open(order_file.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output.fileno(), 1)
    os.dup2(log, 2)
    output.close()
    sys.argv = ["penstock", *arguments]
    _put_points()
    main.run()


def _pass(point: str) -> None:
    file = Path(os.environ[ORDER])
    try:
        current = json.loads(file.read_text())
    except FileNotFoundError:
        return
    if current["at"] != point or not point:
        return
    if current["nth"] > 1:
        order(file, point, current["nth"] - 1, signal.Signals[current["how"]])
        return
    file.unlink()  # an order is carried out once
    os.kill(os.getpid(), signal.Signals[current["how"]])


def _put_points() -> None:
    _around(store, "open_updates", before="opening", after="opened")
    _around(store, "lock_dictionaries", after="locked")
    _around(store, "mark_processed", after="noted")
    _around(store, "notify_commit", after="written")
    _around(snapshot_store, "stage_chunk", after="staged")
    _around(snapshot_store, "close_set", after="closed")
    _around(store, "claim_late_updates", after="looked", when=bool)
    for provider in (PostgresSqlProvider, ItemTableProvider):
        _around(provider, "apply_delta", after="changed")
        _around(provider, "apply_snapshot", after="replaced")
    _around(CommandApplier, "_apply", after="applied")
    _around(CommandApplier, "_refuse", before="refusing", after="refused")
    for bus in (PostgresBus, KafkaBus):
        _around(bus, "publish", after="published", unless=lambda messages, tx=None: tx is not None or not messages)
    for subscription in (PostgresSubscription, KafkaSubscription):
        _around(subscription, "take", after="taken", when=bool)
        _around(subscription, "settle", before="settling", after="settled")
    _around(OutboxRelay, "_announce", before="announcing", after="announced")
    _around(Outbox, "relay", after="relayed", when=bool)
    _after_commit_of(store, "notify_commit", "committed")
    _after_statement("execute", "UPDATE outbox_event SET published", "marked")
    _after_statement("fetch", postgres_bus.SQL["settle"], "freeing")


def _around(
    owner: Any,
    name: str,
    *,
    before: str = "",
    after: str = "",
    when: Callable[[Any], bool] = lambda _result: True,
    unless: Callable[..., bool] = lambda *_args, **_options: False,
) -> None:
    """Put points before and after the function *name* of *owner*; the second only if *when* accepts the result."""
    act: Act = getattr(owner, name)

    @functools.wraps(act)
    async def passing(*args: Any, **options: Any) -> Any:
        _pass(before)
        result = await act(*args, **options)
        if when(result) and not unless(*args[1:], **options):
            _pass(after)
        return result

    setattr(owner, name, passing)


def _after_statement(name: str, text: str, point: str) -> None:
    """Put a point after a statement, inside its transaction."""
    act: Act = getattr(asyncpg.Connection, name)

    @functools.wraps(act)
    async def passing(connection: Any, query: str, *args: Any, **options: Any) -> Any:
        result = await act(connection, query, *args, **options)
        if query.startswith(text):
            _pass(point)
        return result

    setattr(asyncpg.Connection, name, passing)


def _after_commit_of(owner: Any, name: str, point: str) -> None:
    """Put a point right after the end of the transaction in which *owner* called *name*."""
    act: Act = getattr(owner, name)
    end: Act = Transaction.__aexit__
    has_acted: ContextVar[bool] = ContextVar(point, default=False)

    async def acting(*args: Any, **options: Any) -> Any:
        has_acted.set(True)
        return await act(*args, **options)

    async def ending(*args: Any) -> Any:
        result = await end(*args)
        if has_acted.get():
            has_acted.set(False)
            _pass(point)
        return result

    setattr(owner, name, acting)
    setattr(Transaction, "__aexit__", ending)  # noqa: B010 - the stubs know no way to set a method
