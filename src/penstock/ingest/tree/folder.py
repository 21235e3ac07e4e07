"""The tree as a folder: moves are renames, the current state is a symlink, and nothing appears half-written."""

import errno
import fcntl
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from penstock.ingest.contract import FailureCode
from penstock.ingest.model import CurrentPointer, IgnoredEntry, InboxFile, RunFailed, is_run_of
from penstock.ingest.tree import disk, paths
from penstock.ingest.tree.port import (
    STRAY_FILE,
    STRAY_FOLDER,
    FileChanged,
    StoredFile,
    is_supplier_name,
    parse_pointer,
    superseded_error,
)
from penstock.kernel.db.locks import file_lock
from penstock.kernel.errors import Corrupt, NotFound

_REMOVED = "removed-"  # a supplier's name may be that, too, but not with what follows


class FolderTree:
    """The tree below *root*, which has to be there."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        if not self._root.is_dir():
            hint = "make it, or name another with --root; etl_data/ and etl_ops/ are kept in it"
            raise NotFound("ROOT_NOT_FOUND", f"there is no folder {root}", hint=hint)
        self._work = self._at(paths.DATA) / ".work"

    def close(self) -> None:
        pass

    def prepare(self, supplier: str) -> None:
        folders = [paths.inbox, paths.duplicates, paths.broken, paths.obsolete]
        fixed = [paths.RUNS, f"{paths.STATES}/{supplier}", paths.CURRENT, paths.CONFIGS, paths.LEDGERS]
        with self._reported():
            for path in [*(folder(supplier) for folder in folders), *fixed]:
                self._at(path).mkdir(parents=True, exist_ok=True)
            self._work.mkdir(exist_ok=True)
            disk.remove_all(self._work / supplier)  # of a run that was killed
            for left in self._work.glob(f"{_REMOVED}*"):
                with suppress(OSError):  # of a removal that was killed, or that somebody is at
                    disk.remove_all(left)
            for link in self._at(paths.CURRENT).glob(f".{supplier}.*"):
                link.unlink(missing_ok=True)

    @contextmanager
    def lock(self, supplier: str, holder: str) -> Iterator[None]:
        with ExitStack() as stack:
            with self._reported():
                self._work.mkdir(parents=True, exist_ok=True)
                lock = file_lock(self._work / f"{supplier}.lock", holder, subject=f"supplier {supplier}")
                stack.enter_context(lock)
            yield

    def open_work_folder(self, supplier: str, run_id: str) -> AbstractContextManager[Path]:
        return disk.private(self._work / supplier, run_id)

    def now(self) -> float:
        with self._reported():
            probe = self._work / "clock"
            probe.touch()
            return probe.stat().st_mtime

    def list_suppliers(self) -> list[str]:
        with self._reported():
            configs = self._at(paths.CONFIGS)
            named = [file.stem for file in configs.glob("*.yaml")] if configs.is_dir() else []
            return sorted({name for name in [*named, *self.list_folders(paths.INBOX)] if is_supplier_name(name)})

    @contextmanager
    def open_config(self, supplier: str) -> Iterator[Path]:
        yield self._at(paths.config(supplier))

    def list_arrivals(self, supplier: str) -> list[InboxFile]:
        folder = self._at(paths.inbox(supplier))
        with self._reported():
            if not folder.is_dir():
                return []
            return [found for entry in os.scandir(folder) if (found := _arrival(supplier, entry)) is not None]

    def list_ignored(self, supplier: str | None = None) -> list[IgnoredEntry]:
        folder = self._at(paths.INBOX if supplier is None else paths.inbox(supplier))
        used = self.list_suppliers() if supplier is None else []
        with self._reported():
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name) if folder.is_dir() else []
            find_kind = _find_stray_kind if supplier is None else _find_ignored_kind
            kinds = [(entry, find_kind(entry)) for entry in entries if entry.name not in used]
            return [IgnoredEntry(_told(entry.name), kind, _told(entry.path)) for entry, kind in kinds if kind]

    def fetch(self, arrival: InboxFile, target: Path | None = None) -> str:
        file = self._inbox_file(arrival)
        with self._reported(), self._opened(file, arrival.name) as content:
            digest = disk.copied(disk.pieces(content), target)
            if {disk.signature(os.fstat(content.fileno())), disk.read_signature(file)} != {arrival.signature}:
                raise FileChanged(arrival.name)
        return digest

    def move(self, arrival: InboxFile, folder: str, suffix: str = "") -> str | None:
        source = self._inbox_file(arrival)
        with self._reported():
            if disk.read_signature(source) != arrival.signature:
                return None
            self._at(folder).mkdir(parents=True, exist_ok=True)
            for name in disk.propose_names(arrival.name, suffix):
                target = self._at(folder) / name
                if not disk.move(source, target):
                    continue
                if disk.read_signature(target) != arrival.signature:  # another came in the very last moment
                    disk.move(target, source)
                    return None
                return f"{folder}/{name}"
        raise Corrupt("NO_FREE_NAME", f"no free name for {arrival.name} in {folder}")

    def read(self, path: str) -> bytes | None:
        with self._reported():
            try:
                return self._at(path).read_bytes()
            except FileNotFoundError:
                return None

    def write(self, path: str, data: bytes) -> None:
        target = self._at(path)
        draft = target.with_name(f".{uuid.uuid4().hex}.tmp")
        with self._reported():
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with draft.open("xb") as out:
                    out.write(data)
                    disk.sync(out)
                draft.replace(target)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
            disk.sync_folder(target.parent)

    def store(self, source: Path, path: str) -> None:
        target = self._at(path)
        with self._reported():
            target.parent.mkdir(parents=True, exist_ok=True)
            with source.open("rb") as written:
                os.fsync(written.fileno())
            source.replace(target)
            disk.sync_folder(target.parent)

    @contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        with self._reported():
            try:
                file = self._at(path).open("rb")
            except FileNotFoundError:
                raise NotFound("OBJECT_NOT_FOUND", f"there is no {path}", hint="it may have been removed") from None
        with file:
            fcntl.flock(file, fcntl.LOCK_SH)  # I12: `remove` leaves it alone meanwhile
            yield file

    def list_files(self, folder: str) -> Iterator[StoredFile]:
        place = self._at(folder)
        with self._reported():
            for path in sorted(place.rglob("*")) if place.is_dir() else []:
                known = path.lstat()
                if stat.S_ISREG(known.st_mode):
                    # Not the time of its content, which a rename keeps.
                    since = datetime.fromtimestamp(known.st_ctime, UTC)
                    yield StoredFile(path.relative_to(self._root).as_posix(), known.st_size, since)

    def list_folders(self, folder: str) -> list[str]:
        place = self._at(folder)
        with self._reported():
            if not place.is_dir():
                return []
            return sorted(entry.name for entry in os.scandir(place) if entry.is_dir(follow_symlinks=False))

    def list_runs(self, supplier: str) -> list[str]:
        return [name for name in self.list_folders(paths.RUNS) if is_run_of(supplier, name)]

    def list_states(self, supplier: str) -> list[str]:
        return self.list_folders(f"{paths.STATES}/{supplier}")

    def remove(self, path: str) -> bool:
        place = self._at(path)
        with self._reported():
            held = list(disk.held(place))
            try:
                if None in held:
                    return False
                if place.is_dir() and not place.is_symlink():
                    place = disk.set_aside(place, self._work / f"{_REMOVED}{uuid.uuid4().hex}")
                disk.remove_all(place)
            finally:
                for descriptor in held:
                    os.close(descriptor) if descriptor is not None else None
        return True

    def publish(self, source: Path, supplier: str, run_id: str) -> None:
        target = self._at(paths.state(supplier, run_id))
        with self._reported():
            for file in source.iterdir():
                file.chmod(0o444)
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            disk.sync_folder(source)
            source.rename(target)
            target.chmod(0o555)
            disk.sync_folder(target.parent)

    def read_pointer(self, supplier: str) -> CurrentPointer | None:
        run_id = self._current(supplier)
        while run_id is not None:
            told = self.read(paths.state(supplier, run_id, paths.POINTER))
            if told is not None:
                return parse_pointer(told, self.uri(paths.state(supplier, run_id, paths.POINTER)))
            # It may have been replaced, and removed, since it was looked up.
            before, run_id = run_id, self._current(supplier)
            if run_id == before:
                hint = "restore state_store from a backup, or remove the symlink and run again"
                raise Corrupt("STATE_MISSING", f"the current state of {supplier}, {run_id}, is not there", hint=hint)
        return None

    def _current(self, supplier: str) -> str | None:
        with self._reported():
            try:
                return self._at(f"{paths.CURRENT}/{supplier}").readlink().name
            except FileNotFoundError:
                return None

    def switch_pointer(self, supplier: str, pointer: CurrentPointer, seen: CurrentPointer | None) -> None:
        current = self._at(paths.CURRENT)
        link = current / f".{supplier}.{uuid.uuid4().hex}"
        with self._reported():
            link.symlink_to(f"../../state_store/{supplier}/{pointer.run_id}")
            try:
                # Last of all: a writer that was stopped for long finds here that it is late.
                if (now := self.read_pointer(supplier)) != seen:
                    raise superseded_error(supplier, now)
                link.rename(current / supplier)
            finally:
                link.unlink(missing_ok=True)
            disk.sync_folder(current)

    def uri(self, path: str) -> str:
        return str(self._at(path))

    def _at(self, path: str) -> Path:
        return self._root / path

    def _inbox_file(self, arrival: InboxFile) -> Path:
        folder = self._at(paths.inbox(arrival.supplier))
        if "\\" not in arrival.name:
            return folder / arrival.name
        # It may stand for another name, which could not be told.
        with self._reported():
            files = (file for file in folder.iterdir() if _told(file.name) == arrival.name)
            return next(files, folder / arrival.name)

    def _opened(self, file: Path, name: str) -> BinaryIO:
        try:
            return os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
        except FileNotFoundError:
            raise RunFailed(FailureCode.FILE_MISSING, f"{name} is gone", "the supplier took it back") from None
        except PermissionError as error:
            hint = "let the user Penstock runs as read it"
            raise RunFailed(FailureCode.FILE_UNREADABLE, f"{name}: {error.strerror}", hint) from error
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link took its place
                raise FileChanged(name) from None
            raise

    def _reported(self) -> AbstractContextManager[None]:
        return disk.reported(self._root)


def _arrival(supplier: str, entry: os.DirEntry[str]) -> InboxFile | None:
    """Only regular files: what a link leads to is none of the supplier's business."""
    try:
        known = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(known.st_mode):
        return None
    modified, changed = disk.moment(known.st_mtime), disk.moment(known.st_ctime)
    return InboxFile(
        supplier, _told(entry.name), known.st_size, modified, disk.signature(known), str(known.st_ino), changed
    )


def _find_ignored_kind(entry: os.DirEntry[str]) -> str | None:
    """Return the kind of an entry of an inbox; None for a file."""
    if entry.is_symlink():
        return "symbolic link"
    if entry.is_dir():
        return "folder"
    return None if entry.is_file() else "special file"


def _find_stray_kind(entry: os.DirEntry[str]) -> str | None:
    """Return the kind of an entry that is beside the inboxes; None for a hidden file."""
    kind = _find_ignored_kind(entry) or STRAY_FILE
    if kind == "folder":
        return STRAY_FOLDER
    return None if entry.name.startswith(".") else kind


def _told(name: str) -> str:
    """*name*, with what is no UTF-8 written as \\xcf: neither JSON nor a database can hold it otherwise."""
    return os.fsencode(name).decode(errors="backslashreplace")
