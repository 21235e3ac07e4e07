"""Locks: one at a time, by name, and never longer than its holder lives."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.kernel.db.locks import advisory_key, advisory_lock, file_lock, try_advisory_lock
from penstock.kernel.errors import Conflict
from tests.services.postgres import LOCK_AWAITED

HOLDER = """
import sys
from pathlib import Path
from penstock.kernel.db.locks import file_lock
with file_lock(Path(sys.argv[1]), "run acme_7"):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holding(path: Path) -> "Iterator[subprocess.Popen[str]]":
    """Another process that holds *path* until it dies."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_lock_of_another_process_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    """I4: the second caller is told "locked by …" with exit code 6; SIGKILL frees the lock at once."""
    path = tmp_path / "lock"
    with holding(path) as process:
        with pytest.raises(Conflict) as locked, file_lock(path, "me"):
            pass
        assert (locked.value.code, locked.value.exit_code) == ("LOCKED", 6)
        assert f"{tmp_path} is locked by run acme_7 (pid {process.pid}, since " in locked.value.message
        assert locked.value.details["holder"] == "run acme_7"
        process.send_signal(signal.SIGKILL)
        process.wait()
        with file_lock(path, "me"):
            pass


def test_a_lock_is_free_after_its_block(tmp_path: Path) -> None:
    """I4: it is released whether the block ends well or not, and its file stays."""
    path = tmp_path / "lock"
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), file_lock(path, "me"):
            _ = 1 / 0
    assert path.exists()


def test_the_note_tells_who_and_since_when(tmp_path: Path, clock: ManualClock) -> None:
    """I4: a new holder's note replaces the old one, longer as it may have been."""
    path = tmp_path / "lock"
    with file_lock(path, "somebody with a long name", clock):
        pass
    with file_lock(path, "me", clock), pytest.raises(Conflict) as locked, file_lock(path, "you", clock):
        pass
    assert locked.value.details == {"holder": "me", "pid": os.getpid(), "since": clock.now().isoformat()}


@pytest.mark.parametrize("note", [b"", b"{", b"[1]", b"\xff", b'{"code": 1, "message": 2, "hint": 3}'])
def test_a_note_nobody_can_read_is_still_a_lock(tmp_path: Path, note: bytes) -> None:
    """I4: whatever the file says, the second caller gets Conflict."""
    path = tmp_path / "lock"
    with file_lock(path, "me"):
        path.write_bytes(note)
        with pytest.raises(Conflict, match="is locked by unknown"), file_lock(path, "you"):
            pass


async def test_an_advisory_lock_lets_one_in_after_the_other(db: Database) -> None:
    """I4: who waits for a name gets it when it is released, not before."""
    inside: list[str] = []
    async with db.session() as one, db.session() as two:

        async def follow() -> None:
            async with advisory_lock(two, "acme"):
                inside.append("two")

        async with advisory_lock(one, "acme"):
            follower = asyncio.create_task(follow())
            while not await db.fetchval(LOCK_AWAITED):
                assert not follower.done()
            inside.append("one")
        await follower
    assert inside == ["one", "two"]


async def test_trying_a_held_name_says_no_at_once(db: Database) -> None:
    """I4: one holder by name; another name is free, and so is this one afterwards."""
    async with db.session() as one, db.session() as two:
        async with try_advisory_lock(one, "acme") as first, try_advisory_lock(two, "acme") as second:
            assert (first, second) == (True, False)
            async with try_advisory_lock(two, "globex") as other:
                assert other
        async with try_advisory_lock(two, "acme") as again:
            assert again


@pytest.mark.parametrize("lock", [advisory_lock, try_advisory_lock])
async def test_an_advisory_lock_dies_with_its_connection(db: Database, database_url: str, lock: object) -> None:
    """I4: a lost connection frees the name, and leaving the block does not fail over it."""
    connection = await asyncpg.connect(database_url)
    async with lock(connection, "acme"):  # type: ignore[operator]
        await connection.close()
        async with db.session() as other, advisory_lock(other, "acme"):
            pass


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_name_has_a_number_postgresql_takes(name: str) -> None:
    """A lock's number fits a bigint and is the same in every process."""
    assert -(2**63) <= advisory_key(name) < 2**63
    assert advisory_key(name) == advisory_key(name)


def test_the_numbers_never_change() -> None:
    """Two releases side by side, as in a rolling upgrade, exclude each other."""
    assert advisory_key("penstock.migrate") == 8242059233297345630
