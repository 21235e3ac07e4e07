"""The tree in a bucket: a move is a conditional copy, and the current state is a pointer with conditional writes."""

import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Coroutine, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import orjson

from penstock.ingest.contract import FailureCode
from penstock.ingest.model import CurrentPointer, IgnoredEntry, InboxFile, RunFailed, is_run_of
from penstock.ingest.tree import disk, paths
from penstock.ingest.tree.async_bridge import AsyncBridge
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
from penstock.kernel.errors import BadConfig, Conflict, Corrupt, NotFound, PenstockError
from penstock.kernel.storage import ObjectInfo, Storage

T = TypeVar("T")
_REMOVED_HINT = "if the supplier still wants it to be published, it must send the file again"
SMALL = 8 << 20  # bytes that are written in a single request


class BucketTree:
    """The tree in *storage*; *name* is the url of the bucket.

    *locks* is a local folder for locks and temporary files. There is no lock between machines: they may run at the
    same time, and the condition on the pointer lets only one of them publish.
    """

    def __init__(self, storage: Storage, name: str, locks: Path | None = None) -> None:
        self._storage = storage
        self._bridge = AsyncBridge(f"bucket {name}")
        self._locks = locks
        self._key = hashlib.sha256(name.rstrip("/").encode()).hexdigest()[:16]

    def close(self) -> None:
        self._bridge.close()

    def prepare(self, supplier: str) -> None:
        """Do nothing: a bucket has no folders."""

    @contextmanager
    def lock(self, supplier: str, holder: str) -> Iterator[None]:
        with hold_file_lock(self._make_local_folder() / f"{supplier}.lock", holder, subject=f"supplier {supplier}"):
            yield

    def open_work_folder(self, supplier: str, run_id: str) -> AbstractContextManager[Path]:
        return disk.make_private_folder(self._make_local_folder() / supplier, run_id)

    def read_clock(self) -> float:
        return time.time()

    def list_suppliers(self) -> list[str]:
        files = (item.path.removeprefix(f"{paths.CONFIGS}/") for item in self._iterate_objects(paths.CONFIGS))
        named = [name.removesuffix(".yaml") for name in files if name.endswith(".yaml")]
        return sorted({name for name in [*named, *self.list_folders(paths.INBOX)] if is_supplier_name(name)})

    @contextmanager
    def open_config(self, supplier: str) -> Iterator[Path]:
        path = paths.make_config_path(supplier)
        content = self.read(path)
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            file = Path(folder) / path  # messages name the file by this path
            if content is not None:
                file.parent.mkdir(parents=True)
                file.write_bytes(content)
            yield file

    def list_arrivals(self, supplier: str) -> list[InboxFile]:
        folder = paths.make_inbox_path(supplier)
        items = ((item.path.removeprefix(f"{folder}/"), item) for item in self._iterate_objects(folder))
        return [
            InboxFile(supplier, name, item.size, item.modified_at, item.etag) for name, item in items if "/" not in name
        ]

    def list_ignored(self, supplier: str | None = None) -> list[IgnoredEntry]:
        folder = paths.INBOX if supplier is None else paths.make_inbox_path(supplier)
        entries = {item.path.removeprefix(f"{folder}/").partition("/")[:2] for item in self._iterate_objects(folder)}
        if supplier is not None:
            kinds = {name: "folder" for name, slash in entries if slash}
        else:
            used = self.list_suppliers()
            strays = [(name, slash) for name, slash in entries if name not in used and not name.startswith(".")]
            kinds = {name: STRAY_FOLDER if slash else STRAY_FILE for name, slash in strays}
        return [IgnoredEntry(name, kinds[name], self.make_uri(f"{folder}/{name}")) for name in sorted(kinds)]

    def fetch(self, arrival: InboxFile, target: Path | None = None) -> str:
        try:
            digest = self._download(_make_inbox_path(arrival), target, arrival.signature)
        except Conflict:
            raise FileChanged(arrival.name) from None
        except NotFound:
            raise RunFailed(FailureCode.FILE_MISSING, f"{arrival.name} was removed", _REMOVED_HINT) from None
        if not self._is_unchanged(arrival):
            raise FileChanged(arrival.name)
        return digest

    def move(self, arrival: InboxFile, folder: str, suffix: str = "") -> str | None:
        source = _make_inbox_path(arrival)
        with self._make_temporary_folder(arrival.supplier) as folder_of_copy:
            copy = folder_of_copy / "copy"
            try:
                self._download(source, copy, arrival.signature)
            except (Conflict, NotFound):
                return None
            target = self._store_under_free_name(copy, folder, disk.propose_names(arrival.name, suffix))
        # A crash before this line leaves the file in both folders, and the next run moves it again.
        if self._is_unchanged(arrival):
            self._call(self._storage.delete(source))
        return target

    def read(self, path: str) -> bytes | None:
        try:
            return self._call(self._storage.get(path)).data
        except NotFound:
            return None

    def write(self, path: str, data: bytes) -> None:
        self._call(self._storage.put(path, data))

    def store(self, source: Path, path: str) -> None:
        self._call(self._storage.put_file(path, source))

    @contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        with tempfile.TemporaryFile(dir=self._make_local_folder()) as copy:
            with disk.translate_errors(self._make_local_folder()), closing(self._stream(path)) as pieces:
                copy.writelines(pieces)
            copy.seek(0)
            yield copy

    def list_files(self, folder: str) -> Iterator[StoredFile]:
        for item in self._iterate_objects(folder):
            yield StoredFile(item.path, item.size, item.modified_at)

    def list_folders(self, folder: str) -> list[str]:
        below = (item.path.removeprefix(f"{folder}/") for item in self._iterate_objects(folder))
        return sorted({path.partition("/")[0] for path in below if "/" in path})

    def list_runs(self, supplier: str) -> list[str]:
        return [name for name in self.list_folders(paths.RUNS) if is_run_of(supplier, name)]

    def list_states(self, supplier: str) -> list[str]:
        return self.list_folders(f"{paths.STATES}/{supplier}")

    def remove(self, path: str) -> bool:
        """Remove the objects; readers are not affected, because each of them reads a copy."""
        for name in [*(item.path for item in self._iterate_objects(path)), path]:
            self._call(self._storage.delete(name))
        return True

    def publish(self, source: Path, supplier: str, run_id: str) -> None:
        # The pointer is written last: a state that has a pointer is complete.
        for file in sorted(source.iterdir(), key=lambda file: (file.name == paths.POINTER, file.name)):
            self.store(file, paths.make_state_path(supplier, run_id, file.name))

    def read_pointer(self, supplier: str) -> CurrentPointer | None:
        stored = self._read_stored_pointer(supplier)
        return stored[0] if stored else None

    def switch_pointer(self, supplier: str, pointer: CurrentPointer, seen: CurrentPointer | None) -> None:
        stored = self._read_stored_pointer(supplier)
        current = stored[0] if stored else None
        if current != seen:
            raise make_superseded_error(supplier, current)
        if self._call(self._storage.read_info(paths.make_state_path(supplier, pointer.run_id, paths.FACTS))) is None:
            raise make_superseded_error(supplier, current)  # the run was so slow that retention removed its state
        path, data = _make_pointer_path(supplier), orjson.dumps(pointer.as_dict())
        try:
            # The write depends on the pointer that was read, so it fails if another run has published meanwhile.
            if stored is None:
                self._call(self._storage.create(path, data))
            else:
                self._call(self._storage.replace(path, data, etag=stored[1]))
        except Conflict:
            # After a broken connection the client repeats its request, which then conflicts with its own first write.
            if (current := self.read_pointer(supplier)) != pointer:
                raise make_superseded_error(supplier, current) from None

    def make_uri(self, path: str) -> str:
        return self._storage.make_uri(path)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._bridge.call(work)

    def _iterate_objects(self, folder: str) -> Iterator[ObjectInfo]:
        return self._bridge.iterate(self._storage.list(folder))

    def _stream(self, path: str, etag: str | None = None) -> Generator[bytes, None, None]:
        return self._bridge.iterate(self._storage.stream(path, etag=etag))

    def _download(self, path: str, target: Path | None, etag: str) -> str:
        """Download the object with *etag* and return its sha256; Conflict OBJECT_CHANGED or NotFound."""
        with disk.translate_errors(target or path), closing(self._stream(path, etag)) as pieces:
            return disk.copy_pieces(pieces, target)

    def _is_unchanged(self, arrival: InboxFile) -> bool:
        info = self._call(self._storage.read_info(_make_inbox_path(arrival)))
        return info is not None and info.etag == arrival.signature

    def _store_under_free_name(self, source: Path, folder: str, names: Iterator[str]) -> str:
        """Store *source* under the first free name of *names*, and return its path."""
        for name in names:
            target = f"{folder}/{name}"
            with suppress(Conflict):
                self._create(target, source)
                return target
        raise Corrupt("NO_FREE_NAME", f"no free name in {folder}", hint="move some of its files to another folder")

    def _create(self, target: str, source: Path) -> None:
        """Create the object *target* from *source*; Conflict OBJECT_EXISTS if the name is taken."""
        if source.stat().st_size <= SMALL:
            self._call(self._storage.create(target, source.read_bytes()))
            return
        # A large object is written in parts, which cannot be conditional, so its name is reserved first.
        self._call(self._storage.create(target, b""))
        try:
            self._call(self._storage.put_file(target, source))
        except BaseException:
            with suppress(PenstockError):  # a harmless empty object remains
                self._call(self._storage.delete(target))
            raise

    def _read_stored_pointer(self, supplier: str) -> tuple[CurrentPointer, str] | None:
        """Return the pointer and its etag."""
        try:
            stored = self._call(self._storage.get(_make_pointer_path(supplier)))
        except NotFound:
            return None
        return parse_pointer(stored.data, self.make_uri(_make_pointer_path(supplier))), stored.info.etag

    def _make_local_folder(self) -> Path:
        folder = (self._locks or _make_private_folder()) / self._key
        with disk.translate_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextmanager
    def _make_temporary_folder(self, supplier: str) -> Iterator[Path]:
        """Create a temporary folder; if this process is killed, the next run removes it."""
        parent = self._make_local_folder() / supplier
        with disk.translate_errors(parent):
            parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            yield Path(folder)


def _make_inbox_path(arrival: InboxFile) -> str:
    return f"{paths.make_inbox_path(arrival.supplier)}/{arrival.name}"


def _make_pointer_path(supplier: str) -> str:
    return f"{paths.CURRENT}/{supplier}.json"


def _make_private_folder() -> Path:
    """Return the folder of this user among the temporary files; BadConfig if another user has created it."""
    folder = Path(tempfile.gettempdir()) / f"penstock-ingest-{os.getuid()}"
    with disk.translate_errors(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        message = f"{folder} belongs to another user"
        raise BadConfig("LOCK_FOLDER_NOT_OWNED", message, hint="remove it, or set TMPDIR to another folder")
    return folder
