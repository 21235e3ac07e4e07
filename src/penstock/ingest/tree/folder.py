"""The tree in a folder: a move is a rename, the current state is a symlink, and every write is atomic."""

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
    make_superseded_error,
    parse_pointer,
)
from penstock.kernel.db.locks import hold_file_lock
from penstock.kernel.errors import Corrupt, NotFound

_REMOVED = "removed-"  # prefix of detached folders; no supplier has such a name with a UUID


class FolderTree:
    """The tree below *root*, which must exist."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        if not self._root.is_dir():
            hint = "create it, or name another folder with --root; it contains etl_data/ and etl_ops/"
            raise NotFound("ROOT_NOT_FOUND", f"the folder {root} does not exist", hint=hint)
        self._work = self._resolve_path(paths.DATA) / ".work"

    def close(self) -> None:
        pass

    def prepare(self, supplier: str) -> None:
        folders = [paths.make_inbox_path, paths.make_duplicates_path, paths.make_broken_path, paths.make_obsolete_path]
        fixed = [paths.RUNS, f"{paths.STATES}/{supplier}", paths.CURRENT, paths.CONFIGS, paths.LEDGERS]
        with self._translate_errors():
            for path in [*(folder(supplier) for folder in folders), *fixed]:
                self._resolve_path(path).mkdir(parents=True, exist_ok=True)
            self._work.mkdir(exist_ok=True)
            disk.remove_all(self._work / supplier)  # leftovers of a killed run
            for left in self._work.glob(f"{_REMOVED}*"):
                with suppress(OSError):  # left by a removal that was killed or is running
                    disk.remove_all(left)
            for link in self._resolve_path(paths.CURRENT).glob(f".{supplier}.*"):
                link.unlink(missing_ok=True)

    @contextmanager
    def lock(self, supplier: str, holder: str) -> Iterator[None]:
        with ExitStack() as stack:
            with self._translate_errors():
                self._work.mkdir(parents=True, exist_ok=True)
                lock = hold_file_lock(self._work / f"{supplier}.lock", holder, subject=f"supplier {supplier}")
                stack.enter_context(lock)
            yield

    def open_work_folder(self, supplier: str, run_id: str) -> AbstractContextManager[Path]:
        return disk.make_private_folder(self._work / supplier, run_id)

    def read_clock(self) -> float:
        with self._translate_errors():
            probe = self._work / "clock"
            probe.touch()
            return probe.stat().st_mtime

    def list_suppliers(self) -> list[str]:
        with self._translate_errors():
            configs = self._resolve_path(paths.CONFIGS)
            named = [file.stem for file in configs.glob("*.yaml")] if configs.is_dir() else []
            return sorted({name for name in [*named, *self.list_folders(paths.INBOX)] if is_supplier_name(name)})

    @contextmanager
    def open_config(self, supplier: str) -> Iterator[Path]:
        yield self._resolve_path(paths.make_config_path(supplier))

    def list_arrivals(self, supplier: str) -> list[InboxFile]:
        folder = self._resolve_path(paths.make_inbox_path(supplier))
        with self._translate_errors():
            if not folder.is_dir():
                return []
            return [file for entry in os.scandir(folder) if (file := _list_entry(supplier, entry)) is not None]

    def list_ignored(self, supplier: str | None = None) -> list[IgnoredEntry]:
        folder = self._resolve_path(paths.INBOX if supplier is None else paths.make_inbox_path(supplier))
        used = self.list_suppliers() if supplier is None else []
        with self._translate_errors():
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name) if folder.is_dir() else []
            find_kind = _find_stray_kind if supplier is None else _find_ignored_kind
            kinds = [(entry, find_kind(entry)) for entry in entries if entry.name not in used]
            return [
                IgnoredEntry(_escape_name(entry.name), kind, _escape_name(entry.path)) for entry, kind in kinds if kind
            ]

    def fetch(self, arrival: InboxFile, target: Path | None = None) -> str:
        file = self._make_inbox_path(arrival)
        with self._translate_errors(), self._open_file(file, arrival.name) as content:
            digest = disk.copy_pieces(disk.read_pieces(content), target)
            if {disk.format_signature(os.fstat(content.fileno())), disk.read_signature(file)} != {arrival.signature}:
                raise FileChanged(arrival.name)
        return digest

    def move(self, arrival: InboxFile, folder: str, suffix: str = "") -> str | None:
        source = self._make_inbox_path(arrival)
        with self._translate_errors():
            if disk.read_signature(source) != arrival.signature:
                return None
            self._resolve_path(folder).mkdir(parents=True, exist_ok=True)
            for name in disk.propose_names(arrival.name, suffix):
                target = self._resolve_path(folder) / name
                if not disk.move(source, target):
                    continue
                if disk.read_signature(target) != arrival.signature:  # the file was replaced just before the move
                    disk.move(target, source)
                    return None
                return f"{folder}/{name}"
        hint = "move some of its files to another folder"
        raise Corrupt("NO_FREE_NAME", f"no free name for {arrival.name} in {folder}", hint=hint)

    def read(self, path: str) -> bytes | None:
        with self._translate_errors():
            try:
                return self._resolve_path(path).read_bytes()
            except FileNotFoundError:
                return None

    def write(self, path: str, data: bytes) -> None:
        target = self._resolve_path(path)
        draft = target.with_name(f".{uuid.uuid4().hex}.tmp")
        with self._translate_errors():
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
        target = self._resolve_path(path)
        with self._translate_errors():
            target.parent.mkdir(parents=True, exist_ok=True)
            with source.open("rb") as written:
                os.fsync(written.fileno())
            source.replace(target)
            disk.sync_folder(target.parent)

    @contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        with self._translate_errors():
            try:
                file = self._resolve_path(path).open("rb")
            except FileNotFoundError:
                hint = "it may have been removed by retention"
                raise NotFound("OBJECT_NOT_FOUND", f"the file {path} does not exist", hint=hint) from None
        with file:
            fcntl.flock(file, fcntl.LOCK_SH)  # I12: `remove` skips the file while it is locked
            yield file

    def list_files(self, folder: str) -> Iterator[StoredFile]:
        parent = self._resolve_path(folder)
        with self._translate_errors():
            for path in sorted(parent.rglob("*")) if parent.is_dir() else []:
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    # The modification time does not change with a rename.
                    since = datetime.fromtimestamp(status.st_ctime, UTC)
                    yield StoredFile(path.relative_to(self._root).as_posix(), status.st_size, since)

    def list_folders(self, folder: str) -> list[str]:
        parent = self._resolve_path(folder)
        with self._translate_errors():
            if not parent.is_dir():
                return []
            return sorted(entry.name for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False))

    def list_runs(self, supplier: str) -> list[str]:
        return [name for name in self.list_folders(paths.RUNS) if is_run_of(supplier, name)]

    def list_states(self, supplier: str) -> list[str]:
        return self.list_folders(f"{paths.STATES}/{supplier}")

    def remove(self, path: str) -> bool:
        target = self._resolve_path(path)
        with self._translate_errors():
            locks = list(disk.lock_files(target))
            try:
                if None in locks:
                    return False
                if target.is_dir() and not target.is_symlink():
                    target = disk.detach_folder(target, self._work / f"{_REMOVED}{uuid.uuid4().hex}")
                disk.remove_all(target)
            finally:
                for descriptor in locks:
                    os.close(descriptor) if descriptor is not None else None
        return True

    def publish(self, source: Path, supplier: str, run_id: str) -> None:
        target = self._resolve_path(paths.make_state_path(supplier, run_id))
        with self._translate_errors():
            for file in source.iterdir():
                file.chmod(0o444)
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            disk.sync_folder(source)
            source.rename(target)
            target.chmod(0o555)
            disk.sync_folder(target.parent)

    def read_pointer(self, supplier: str) -> CurrentPointer | None:
        run_id = self._read_link(supplier)
        while run_id is not None:
            content = self.read(paths.make_state_path(supplier, run_id, paths.POINTER))
            if content is not None:
                return parse_pointer(content, self.make_uri(paths.make_state_path(supplier, run_id, paths.POINTER)))
            # The state may have been replaced and removed after the link was read.
            before, run_id = run_id, self._read_link(supplier)
            if run_id == before:
                hint = f"restore state_store from a backup, or remove {paths.CURRENT}/{supplier} and run ingest again"
                message = f"the current state of {supplier}, {run_id}, is missing"
                raise Corrupt("STATE_MISSING", message, hint=hint)
        return None

    def _read_link(self, supplier: str) -> str | None:
        with self._translate_errors():
            try:
                return self._resolve_path(f"{paths.CURRENT}/{supplier}").readlink().name
            except FileNotFoundError:
                return None

    def switch_pointer(self, supplier: str, pointer: CurrentPointer, seen: CurrentPointer | None) -> None:
        current = self._resolve_path(paths.CURRENT)
        link = current / f".{supplier}.{uuid.uuid4().hex}"
        with self._translate_errors():
            link.symlink_to(f"../../state_store/{supplier}/{pointer.run_id}")
            try:
                # The last check before the rename: a process that was stopped for long is superseded here.
                if (pointer_now := self.read_pointer(supplier)) != seen:
                    raise make_superseded_error(supplier, pointer_now)
                link.rename(current / supplier)
            finally:
                link.unlink(missing_ok=True)
            disk.sync_folder(current)

    def make_uri(self, path: str) -> str:
        return str(self._resolve_path(path))

    def _resolve_path(self, path: str) -> Path:
        return self._root / path

    def _make_inbox_path(self, arrival: InboxFile) -> Path:
        folder = self._resolve_path(paths.make_inbox_path(arrival.supplier))
        if "\\" not in arrival.name:
            return folder / arrival.name
        # The backslash may be part of an escaped byte of the real name.
        with self._translate_errors():
            files = (file for file in folder.iterdir() if _escape_name(file.name) == arrival.name)
            return next(files, folder / arrival.name)

    def _open_file(self, file: Path, name: str) -> BinaryIO:
        try:
            return os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
        except FileNotFoundError:
            hint = "if the supplier still wants it to be published, it must send the file again"
            raise RunFailed(FailureCode.FILE_MISSING, f"{name} was removed", hint) from None
        except PermissionError as error:
            hint = "give the user that runs Penstock read access to the inbox"
            raise RunFailed(FailureCode.FILE_UNREADABLE, f"{name} cannot be opened: {error.strerror}", hint) from error
        except OSError as error:
            if error.errno == errno.ELOOP:  # the file was replaced by a link
                raise FileChanged(name) from None
            raise

    def _translate_errors(self) -> AbstractContextManager[None]:
        return disk.translate_errors(self._root)


def _list_entry(supplier: str, entry: os.DirEntry[str]) -> InboxFile | None:
    """Return the inbox file of *entry*; None if it is not a regular file. A link may point outside of the inbox."""
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    modified, changed = disk.parse_timestamp(status.st_mtime), disk.parse_timestamp(status.st_ctime)
    name, signature = _escape_name(entry.name), disk.format_signature(status)
    return InboxFile(supplier, name, status.st_size, modified, signature, str(status.st_ino), changed)


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


def _escape_name(name: str) -> str:
    """Return *name* with bytes that are not UTF-8 escaped, e.g. as \\xcf, because JSON and databases need UTF-8."""
    return os.fsencode(name).decode(errors="backslashreplace")
