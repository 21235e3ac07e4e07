"""A disk that is full, and permissions that were lost: said clearly, and nothing is lost or half-published."""

import errno
import io
import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.ingest.contract import FailureCode
from penstock.ingest.tree import disk, paths
from penstock.kernel.errors import Transient
from tests.ingest.crash_process import answered, run_without_power
from tests.ingest.supplier_folder import SUPPLIER, Facts, SupplierFolder, csv, digest, quick_folder
from tests.support.require import require

FIRST: Facts = {"A": 1, "B": 2}
NEW: Facts = {"A": 10, "C": 3}
BAD = csv([("A", "x"), ("B", "y")])
CALLS = ("rename", "replace", "link", "symlink", "mkdir", "fsync")


@pytest.fixture
def folder() -> Iterator[Path]:
    with quick_folder() as folder:
        yield folder


@pytest.fixture
def supplier(folder: Path) -> SupplierFolder:
    return SupplierFolder(folder)


class FullDisk:
    """From the *number*-th change on there is no room, or only for that one change there is not."""

    def __init__(self, number: int, *, is_lasting: bool) -> None:
        self._count = itertools.count(1)
        self._number = number
        self._is_lasting = is_lasting
        self.has_failed = False

    def __call__(self) -> None:
        now = next(self._count)
        if now == self._number or (self._is_lasting and now > self._number):
            self.has_failed = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def fitted(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self._guarded(getattr(os, name)))
            patch.setattr(io, "open", self._opened(io.open))
            patch.setattr(disk, "move", self._guarded(disk.move), raising=False)
            yield

    def _guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            self()
            return call(*args, **options)

        return called

    def _opened(self, opened: Callable[..., Any]) -> Callable[..., Any]:
        """Whoever writes a file writes half of what he gives when there is no room for all."""

        def called(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if "b" not in mode or not set(mode) & set("xw"):
                return opened(file, mode, *args, **options)
            self()
            out = opened(file, mode, *args, **options)
            return _Half(out, self)

        return called


class _Half:
    def __init__(self, out: Any, full: FullDisk) -> None:
        self._out = out
        self._full = full

    def __enter__(self) -> "_Half":
        return self

    def __exit__(self, *_: object) -> None:
        self._out.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)

    def write(self, data: bytes) -> int:
        try:
            self._full()
        except OSError:
            self._out.write(bytes(data)[: len(data) // 2])
            raise
        written: int = self._out.write(data)
        return written


def how_it_ended(supplier: SupplierFolder, full: FullDisk) -> str | None:
    """The code of a run on a disk that gets full, and the hint if it is not of the file; None when it passed."""
    try:
        with full.fitted():
            outcome = supplier.run()
    except Transient as error:
        return f"{error.code}: {error.hint}"
    assert outcome.manifest is not None
    return outcome.manifest.failure.code.value if outcome.manifest.failure else None


def drop_some(supplier: SupplierFolder) -> None:
    supplier.drop("new.csv", csv(NEW), at=9)
    supplier.drop("again.csv", csv(FIRST), at=8)
    supplier.drop("older.csv", csv({"A": 7}), at=7)


def drop_bad(supplier: SupplierFolder) -> None:
    supplier.drop("bad.csv", BAD, at=9)


@pytest.mark.full
@pytest.mark.parametrize("is_lasting", [False, True], ids=["for a moment", "for good"])
@pytest.mark.parametrize(("drops", "code"), [(drop_some, None), (drop_bad, FailureCode.DQ_TOO_MANY_BAD_ROWS)])
def test_the_disk_may_be_full_at_every_write(
    folder: Path, drops: Callable[[SupplierFolder], None], code: FailureCode | None, is_lasting: bool
) -> None:
    """I16: no room at the n-th change, for every n: STORAGE_DOWN, the state old or new, and the next run works."""
    (folder / "before").mkdir()
    before = SupplierFolder(folder / "before")
    before.drop("first.csv", csv(FIRST))
    before.run()
    drops(before)
    expected = NEW if code is None else FIRST
    for number in itertools.count(1):
        supplier = before.copy(folder / str(number))
        full = FullDisk(number, is_lasting=is_lasting)
        said = how_it_ended(supplier, full)
        try:
            # What is only convenient may fail and be done otherwise.
            assert said in ("STORAGE_DOWN: free space on the disk, then run again", code and code.value)
            supplier.check_nothing_is_half()
            supplier.check_nothing_is_lost()
            assert supplier.facts() in (FIRST, expected)
            supplier.run()
            assert supplier.facts() == expected
            supplier.check_all_is_well()
            assert supplier.everywhere()["inbox"] == Counter()
            assert supplier.run().reason == "the inbox is empty"
        except AssertionError as error:
            error.add_note(f"the disk was full at change {number}")
            raise
        if not full.has_failed:
            return


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    where = tmp_path / "disk"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "penstock-test", str(where)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        require("mount", "there is no mount here")
    if made.returncode:
        require("mount", f"a small disk cannot be mounted here: {made.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)


def filled(disk_folder: Path, but: int) -> Path:
    """All of a disk but so many bytes taken by somebody else."""
    ballast = disk_folder / "ballast"
    room = os.statvfs(disk_folder).f_bavail * os.statvfs(disk_folder).f_bsize
    ballast.write_bytes(b"\0" * max(room - but, 0))
    return ballast


@pytest.mark.parametrize("room", [0, 4096, 20_000, 60_000, 120_000, 200_000, 300_000])
def test_a_full_disk(small_disk: Path, room: int) -> None:
    """I16: on a disk that is really full, be it in the copy, the facts, the index or the state, the old state stays."""
    supplier = SupplierFolder(small_disk)
    supplier.drop("first.csv", csv(FIRST))
    supplier.run()
    many = {f"S{number}": number for number in range(6_000)}
    supplier.drop("many.csv", csv(many), at=9)
    ballast = filled(small_disk, room)
    with pytest.raises(Transient) as down:
        supplier.run()
    assert (down.value.code, down.value.hint) == ("STORAGE_DOWN", "free space on the disk, then run again")
    assert supplier.facts() == FIRST
    supplier.check_nothing_is_half()
    supplier.check_nothing_is_lost()
    ballast.unlink()
    big_enough = supplier.copy(small_disk.parent / "larger")
    assert big_enough.run().is_pass
    assert big_enough.facts() == many
    big_enough.check_all_is_well()


def penstock(supplier: SupplierFolder, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program, as an operator starts it."""
    command = [sys.executable, "-m", "penstock.cli.main", "ingest", *arguments, "--root", str(supplier.root), "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.full
def test_the_program_says_that_the_disk_is_full(small_disk: Path) -> None:
    """I16: exit code 7, and what to do; 0 once there is room."""
    supplier = SupplierFolder(small_disk)
    supplier.drop("new.csv", csv(NEW))
    ballast = filled(small_disk, 0)
    ended = penstock(supplier, "run", SUPPLIER)
    assert ended.returncode == 7, ended.stderr
    assert "STORAGE_DOWN" in ended.stderr
    assert "free space" in ended.stderr
    ballast.unlink()
    assert penstock(supplier, "run", SUPPLIER).returncode == 0
    assert supplier.facts() == NEW


# Permissions.


@pytest.fixture
def owned(supplier: SupplierFolder) -> SupplierFolder:
    """A place with a state, where only the modes of the files tell who may do what."""
    if sys.platform != "linux" and os.getuid() == 0:
        require("capabilities", "root may do everything here")
    supplier.drop("first.csv", csv(FIRST))
    supplier.run()
    return supplier


def test_nobody_has_to_be_root(owned: SupplierFolder) -> None:
    """I11: states that are read-only are replaced all the same."""
    owned.drop("new.csv", csv(NEW))
    assert answered(run_without_power, owned.root) == (0, None, None)
    assert owned.facts() == NEW
    owned.check_all_is_well()


@pytest.mark.full
@pytest.mark.parametrize(
    "path",
    [
        paths.inbox(SUPPLIER),
        f"{paths.STATES}/{SUPPLIER}",
        paths.RUNS,
        paths.CURRENT,
        f"{paths.DATA}/.work",
        f"{paths.DATA}/.work/{SUPPLIER}.lock",
        paths.LEDGERS,
        paths.archive(SUPPLIER),
        paths.DATA,
    ],
)
@pytest.mark.parametrize("mode", [0o000, 0o555])
def test_a_folder_that_was_closed(owned: SupplierFolder, path: str, mode: int) -> None:
    """I16: a folder that may not be read or written any more is told; when it is open again, all is well."""
    owned.drop("new.csv", csv(NEW))
    closed = owned.root / path
    before = closed.stat().st_mode
    closed.chmod(mode)
    ended = answered(run_without_power, owned.root)
    closed.chmod(before)
    if mode == 0o555 and path in (paths.inbox(SUPPLIER), paths.archive(SUPPLIER)):
        assert ended == (0, None, None)  # published, but the file could not be moved
    elif (path, mode) != (paths.DATA, 0o555):  # there is nothing to write in it
        assert ended == (7, "STORAGE_DOWN", "give the user that runs Penstock read and write access to the tree")
    owned.check_nothing_is_half()
    owned.check_nothing_is_lost()
    assert owned.facts() in (FIRST, NEW)
    assert answered(run_without_power, owned.root) == (0, None, None)
    assert owned.facts() == NEW
    owned.check_all_is_well()


def test_a_file_that_may_not_be_read(owned: SupplierFolder) -> None:
    """I6: FILE_UNREADABLE; it, and no other, is put aside as broken, and the next run takes the others."""
    owned.drop("new.csv", csv(NEW), at=9)
    owned.drop("new.csv.old", csv({"A": 7}), at=8).chmod(0)
    assert answered(run_without_power, owned.root) == (0, "FILE_UNREADABLE", None)
    assert owned.facts() == FIRST
    assert owned.kept(paths.broken(SUPPLIER)) == Counter([digest(csv({"A": 7}))])
    assert answered(run_without_power, owned.root) == (0, None, None)
    assert owned.facts() == NEW
    owned.check_all_is_well()
