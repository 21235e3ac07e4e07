"""Locks: one holder per name, and never longer than the holder lives."""

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
from penstock.kernel.db.locks import compute_advisory_key, hold_advisory_lock, hold_file_lock, try_advisory_lock
from penstock.kernel.errors import Conflict
from tests.services.postgres import LOCK_AWAITED

HOLDER = """
import sys
from pathlib import Path
from penstock.kernel.db.locks import hold_file_lock
with hold_file_lock(Path(sys.argv[1]), "run acme_7"):
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextmanager
def lock_in_other_process(path: Path) -> "Iterator[subprocess.Popen[str]]":
    """Start another process that locks *path* until it dies."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_lock_of_another_process_ends_with_the_process(tmp_path: Path) -> None:
    """I4: the error of the second caller names the holder, with exit code 6; SIGKILL releases the lock at once."""
    path = tmp_path / "lock"
    with lock_in_other_process(path) as process:
        with pytest.raises(Conflict) as locked, hold_file_lock(path, "me"):
            pass
        assert (locked.value.code, locked.value.exit_code) == ("LOCKED", 6)
        assert f"{tmp_path} is locked by run acme_7 (pid {process.pid}, since " in locked.value.message
        assert locked.value.details["holder"] == "run acme_7"
        process.send_signal(signal.SIGKILL)
        process.wait()
        with hold_file_lock(path, "me"):
            pass


def test_a_lock_is_free_after_its_block(tmp_path: Path) -> None:
    """I4: the lock is released also after an exception, and its file remains."""
    path = tmp_path / "lock"
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), hold_file_lock(path, "me"):
            _ = 1 / 0
    assert path.exists()


def test_the_lock_file_names_the_holder(tmp_path: Path, clock: ManualClock) -> None:
    """I4: the note of a new holder replaces the old one, which may have been longer."""
    path = tmp_path / "lock"
    with hold_file_lock(path, "a holder with a long name", clock):
        pass
    with hold_file_lock(path, "me", clock), pytest.raises(Conflict) as locked, hold_file_lock(path, "you", clock):
        pass
    assert locked.value.details == {"holder": "me", "pid": os.getpid(), "since": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize("note", [b"", b"{", b"[1]", b"\xff", b'{"code": 1, "message": 2, "hint": 3}'])
def test_a_lock_with_an_unreadable_note_is_still_a_lock(tmp_path: Path, note: bytes) -> None:
    """I4: the second caller gets Conflict whatever the file contains."""
    path = tmp_path / "lock"
    with hold_file_lock(path, "me"):
        path.write_bytes(note)
        with pytest.raises(Conflict, match="is locked by unknown"), hold_file_lock(path, "you"):
            pass


async def test_an_advisory_lock_has_one_holder(db: Database) -> None:
    """I4: a waiting session gets the lock when it is released, and not before."""
    inside: list[str] = []
    async with db.session() as first, db.session() as second:

        async def follow() -> None:
            async with hold_advisory_lock(second, "acme"):
                inside.append("second")

        async with hold_advisory_lock(first, "acme"):
            follower = asyncio.create_task(follow())
            while not await db.fetchval(LOCK_AWAITED):
                assert not follower.done()
            inside.append("first")
        await follower
    assert inside == ["first", "second"]


async def test_trying_a_locked_name_returns_at_once(db: Database) -> None:
    """I4: a name has one holder; another name is free, and the same name is free afterwards."""
    async with db.session() as first, db.session() as second:
        async with try_advisory_lock(first, "acme") as locked, try_advisory_lock(second, "acme") as refused:
            assert (locked, refused) == (True, False)
            async with try_advisory_lock(second, "globex") as other:
                assert other
        async with try_advisory_lock(second, "acme") as again:
            assert again


@pytest.mark.parametrize("lock", [hold_advisory_lock, try_advisory_lock])
async def test_an_advisory_lock_ends_with_its_connection(db: Database, database_url: str, lock: object) -> None:
    """I4: a lost connection releases the lock, and the end of the block does not fail."""
    connection = await asyncpg.connect(database_url)
    async with lock(connection, "acme"):  # type: ignore[operator]
        await connection.close()
        async with db.session() as other, hold_advisory_lock(other, "acme"):
            pass


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_name_has_a_valid_number(name: str) -> None:
    """The number of a lock fits a bigint, and is the same in every process."""
    assert -(2**63) <= compute_advisory_key(name) < 2**63
    assert compute_advisory_key(name) == compute_advisory_key(name)


def test_the_numbers_never_change() -> None:
    """Two releases exclude each other during a rolling upgrade."""
    assert compute_advisory_key("penstock.migrate") == 8242059233297345630
