"""The tree in a bucket: moves are copies that replace nothing, the current state is a pointer written conditionally."""

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
    parse_pointer,
    superseded_error,
)
from penstock.kernel.db.locks import file_lock
from penstock.kernel.errors import BadConfig, Conflict, Corrupt, NotFound, PenstockError
from penstock.kernel.storage import ObjectInfo, Storage

T = TypeVar("T")
SMALL = 8 << 20  # bytes that are written in one go


class BucketTree:
    """The tree in *storage*, which people call *name*: its url.

    *locks* is a folder of this machine, for locks and for what is worked on. Between machines there is no lock: they
    may run at once, and the pointer's condition lets one of them publish.
    """

    def __init__(self, storage: Storage, name: str, locks: Path | None = None) -> None:
        self._storage = storage
        self._bridge = AsyncBridge(f"bucket {name}")
        self._locks = locks
        self._key = hashlib.sha256(name.rstrip("/").encode()).hexdigest()[:16]

    def close(self) -> None:
        self._bridge.close()

    def prepare(self, supplier: str) -> None:
        """A bucket has no folders to make."""

    @contextmanager
    def lock(self, supplier: str, holder: str) -> Iterator[None]:
        with file_lock(self._local() / f"{supplier}.lock", holder, subject=f"supplier {supplier}"):
            yield

    def open_work_folder(self, supplier: str, run_id: str) -> AbstractContextManager[Path]:
        return disk.private(self._local() / supplier, run_id)

    def now(self) -> float:
        return time.time()

    def list_suppliers(self) -> list[str]:
        files = (one.path.removeprefix(f"{paths.CONFIGS}/") for one in self._objects(paths.CONFIGS))
        named = [name.removesuffix(".yaml") for name in files if name.endswith(".yaml")]
        return sorted({name for name in [*named, *self.list_folders(paths.INBOX)] if is_supplier_name(name)})

    @contextmanager
    def open_config(self, supplier: str) -> Iterator[Path]:
        path = paths.config(supplier)
        content = self.read(path)
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            file = Path(folder) / path  # so that what is wrong with it is told by its name
            if content is not None:
                file.parent.mkdir(parents=True)
                file.write_bytes(content)
            yield file

    def list_arrivals(self, supplier: str) -> list[InboxFile]:
        folder = paths.inbox(supplier)
        found = ((one.path.removeprefix(f"{folder}/"), one) for one in self._objects(folder))
        return [
            InboxFile(supplier, name, one.size, one.modified_at, one.etag) for name, one in found if "/" not in name
        ]

    def list_ignored(self, supplier: str | None = None) -> list[IgnoredEntry]:
        folder = paths.INBOX if supplier is None else paths.inbox(supplier)
        entries = {found.path.removeprefix(f"{folder}/").partition("/")[:2] for found in self._objects(folder)}
        if supplier is not None:
            kinds = {name: "folder" for name, slash in entries if slash}
        else:
            used = self.list_suppliers()
            strays = [(name, slash) for name, slash in entries if name not in used and not name.startswith(".")]
            kinds = {name: STRAY_FOLDER if slash else STRAY_FILE for name, slash in strays}
        return [IgnoredEntry(name, kinds[name], self.uri(f"{folder}/{name}")) for name in sorted(kinds)]

    def fetch(self, arrival: InboxFile, target: Path | None = None) -> str:
        try:
            digest = self._download(_inbox_file(arrival), target, arrival.signature)
        except Conflict:
            raise FileChanged(arrival.name) from None
        except NotFound:
            raise RunFailed(FailureCode.FILE_MISSING, f"{arrival.name} is gone", "the supplier took it back") from None
        if not self._is_there(arrival):
            raise FileChanged(arrival.name)
        return digest

    def move(self, arrival: InboxFile, folder: str, suffix: str = "") -> str | None:
        source = _inbox_file(arrival)
        with self._beside_work(arrival.supplier) as place:
            copy = place / "copy"
            try:
                self._download(source, copy, arrival.signature)
            except (Conflict, NotFound):
                return None
            target = self._placed(copy, folder, disk.propose_names(arrival.name, suffix))
        # A crash before this leaves it in both places, and the next run moves it again.
        if self._is_there(arrival):
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
        with tempfile.TemporaryFile(dir=self._local()) as copy:
            with disk.reported(self._local()), closing(self._pieces(path)) as pieces:
                copy.writelines(pieces)
            copy.seek(0)
            yield copy

    def list_files(self, folder: str) -> Iterator[StoredFile]:
        for one in self._objects(folder):
            yield StoredFile(one.path, one.size, one.modified_at)

    def list_folders(self, folder: str) -> list[str]:
        below = (one.path.removeprefix(f"{folder}/") for one in self._objects(folder))
        return sorted({path.partition("/")[0] for path in below if "/" in path})

    def list_runs(self, supplier: str) -> list[str]:
        return [name for name in self.list_folders(paths.RUNS) if is_run_of(supplier, name)]

    def list_states(self, supplier: str) -> list[str]:
        return self.list_folders(f"{paths.STATES}/{supplier}")

    def remove(self, path: str) -> bool:
        """Whoever reads has a copy of his own, so nothing stays."""
        for one in [*(found.path for found in self._objects(path)), path]:
            self._call(self._storage.delete(one))
        return True

    def publish(self, source: Path, supplier: str, run_id: str) -> None:
        # The pointer last: a state that has it is whole.
        for file in sorted(source.iterdir(), key=lambda file: (file.name == paths.POINTER, file.name)):
            self.store(file, paths.state(supplier, run_id, file.name))

    def read_pointer(self, supplier: str) -> CurrentPointer | None:
        found = self._pointer(supplier)
        return found[0] if found else None

    def switch_pointer(self, supplier: str, pointer: CurrentPointer, seen: CurrentPointer | None) -> None:
        found = self._pointer(supplier)
        now = found[0] if found else None
        if now != seen:
            raise superseded_error(supplier, now)
        if self._call(self._storage.info(paths.state(supplier, pointer.run_id, paths.FACTS))) is None:
            raise superseded_error(supplier, now)  # it took so long that its state was swept up
        path, data = _pointer_file(supplier), orjson.dumps(pointer.as_dict())
        try:
            # On condition of what was read above: whoever is stopped here for long finds that it is late.
            if found is None:
                self._call(self._storage.create(path, data))
            else:
                self._call(self._storage.replace(path, data, etag=found[1]))
        except Conflict:
            # A client whose connection broke asks twice, and is refused because of its own first writing.
            if (now := self.read_pointer(supplier)) != pointer:
                raise superseded_error(supplier, now) from None

    def uri(self, path: str) -> str:
        return self._storage.uri(path)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._bridge.call(work)

    def _objects(self, folder: str) -> Iterator[ObjectInfo]:
        return self._bridge.each(self._storage.list(folder))

    def _pieces(self, path: str, etag: str | None = None) -> Generator[bytes, None, None]:
        return self._bridge.each(self._storage.stream(path, etag=etag))

    def _download(self, path: str, target: Path | None, etag: str) -> str:
        """The sha256 of just the content *etag* names; Conflict OBJECT_CHANGED, NotFound."""
        with disk.reported(target or path), closing(self._pieces(path, etag)) as pieces:
            return disk.copied(pieces, target)

    def _is_there(self, arrival: InboxFile) -> bool:
        found = self._call(self._storage.info(_inbox_file(arrival)))
        return found is not None and found.etag == arrival.signature

    def _placed(self, source: Path, folder: str, names: Iterator[str]) -> str:
        """Where it is now: under the first of *names* that nobody has."""
        for name in names:
            target = f"{folder}/{name}"
            with suppress(Conflict):
                self._create(target, source)
                return target
        raise Corrupt("NO_FREE_NAME", f"no free name in {folder}", hint="move some of its files away")

    def _create(self, target: str, source: Path) -> None:
        """Conflict OBJECT_EXISTS when the name is taken."""
        if source.stat().st_size <= SMALL:
            self._call(self._storage.create(target, source.read_bytes()))
            return
        # What is large comes in parts, which know no condition: the name is taken first.
        self._call(self._storage.create(target, b""))
        try:
            self._call(self._storage.put_file(target, source))
        except BaseException:
            with suppress(PenstockError):  # an empty file is left there, which does no harm
                self._call(self._storage.delete(target))
            raise

    def _pointer(self, supplier: str) -> tuple[CurrentPointer, str] | None:
        """The pointer, and the etag of just this content."""
        try:
            stored = self._call(self._storage.get(_pointer_file(supplier)))
        except NotFound:
            return None
        return parse_pointer(stored.data, self.uri(_pointer_file(supplier))), stored.info.etag

    def _local(self) -> Path:
        folder = (self._locks or _own_folder()) / self._key
        with disk.reported(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextmanager
    def _beside_work(self, supplier: str) -> Iterator[Path]:
        """A folder that the next run removes if we are killed."""
        place = self._local() / supplier
        with disk.reported(place):
            place.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place) as folder:
            yield Path(folder)


def _inbox_file(arrival: InboxFile) -> str:
    return f"{paths.inbox(arrival.supplier)}/{arrival.name}"


def _pointer_file(supplier: str) -> str:
    return f"{paths.CURRENT}/{supplier}.json"


def _own_folder() -> Path:
    """Among the temporary files, where everybody may make folders: only our own will do."""
    folder = Path(tempfile.gettempdir()) / f"penstock-ingest-{os.getuid()}"
    with disk.reported(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        known = folder.lstat()
    if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.getuid():
        raise BadConfig(
            "LOCK_FOLDER_NOT_OWNED", f"{folder} is not ours", hint="remove it, or set TMPDIR to another folder"
        )
    return folder
