"""The tree of files ingest lives in: a folder, or a bucket. Paths are relative to its root."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Protocol

import orjson

from penstock.ingest.contract import FailureCode
from penstock.ingest.model import CurrentPointer, IgnoredEntry, InboxFile, RunFailed, check_supplier_name
from penstock.kernel.errors import Corrupt, Invalid

# Entries beside the inboxes of suppliers.
STRAY_FILE = "file outside of the inbox of a supplier"
STRAY_FOLDER = "folder whose name is not valid for a supplier"


class FileChanged(Exception):
    """A file is no longer the one that was looked at."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file somewhere in the tree."""

    path: str
    size: int
    since: datetime  # when it came to be there


class FileTree(Protocol):
    """Blocking; one process per supplier writes at a time. What fails below comes as Transient STORAGE_DOWN."""

    def close(self) -> None:
        """Give back what is held open."""

    def prepare(self, supplier: str) -> None:
        """Make the folders of a supplier."""

    def lock(self, supplier: str, holder: str) -> AbstractContextManager[None]:
        """I4: be the only one who works for *supplier*; Conflict LOCKED, naming who does, when another does."""

    def open_work_folder(self, supplier: str, run_id: str) -> AbstractContextManager[Path]:
        """A private local folder for one run, gone at the end; what earlier runs left there goes first."""

    def now(self) -> float:
        """Seconds by the clock that dates the files here, which need not be ours."""

    def list_suppliers(self) -> list[str]:
        """Everybody who has a configuration or an inbox."""

    def open_config(self, supplier: str) -> AbstractContextManager[Path]:
        """The supplier's configuration as a local file, which may not be there."""

    def list_arrivals(self, supplier: str) -> list[InboxFile]:
        """The files in the inbox, unfinished ones too."""

    def list_ignored(self, supplier: str | None = None) -> list[IgnoredEntry]:
        """Return the entries of an inbox that are not files; without *supplier*, entries that belong to no supplier."""

    def fetch(self, arrival: InboxFile, target: Path | None = None) -> str:
        """The sha256 of a file, copied to *target* in the same go; Changed when it did while it was read."""

    def move(self, arrival: InboxFile, folder: str, suffix: str = "") -> str | None:
        """I2: put it into *folder*, under another name rather than over another file; None when it is another now."""

    def read(self, path: str) -> bytes | None:
        """A small file, or None."""

    def write(self, path: str, data: bytes) -> None:
        """A small file, wholly or not at all."""

    def store(self, source: Path, path: str) -> None:
        """Put a local file there, wholly or not at all; *source* may be gone afterwards."""

    def open(self, path: str) -> AbstractContextManager[BinaryIO]:
        """A file to read from, all of one content; NotFound OBJECT_NOT_FOUND. While it is open it is not removed."""

    def list_files(self, folder: str) -> Iterator[StoredFile]:
        """Every file below *folder*."""

    def list_folders(self, folder: str) -> list[str]:
        """The names of the folders in *folder*."""

    def list_runs(self, supplier: str) -> list[str]:
        """The ids of the runs of a supplier that left anything, the oldest first."""

    def list_states(self, supplier: str) -> list[str]:
        """The ids of the runs whose states are kept."""

    def remove(self, path: str) -> bool:
        """Remove a file, or a folder with all in it; False when somebody reads it, and so it stays."""

    def publish(self, source: Path, supplier: str, run_id: str) -> None:
        """I11: make a local folder, all of it synced, a state that is never changed again; it is not current yet."""

    def read_pointer(self, supplier: str) -> CurrentPointer | None:
        """Which state is current."""

    def switch_pointer(self, supplier: str, pointer: CurrentPointer, seen: CurrentPointer | None) -> None:
        """I11: make a state the current one, unless another became it since *seen*: then Failed SUPERSEDED."""

    def uri(self, path: str) -> str:
        """Where a file is, for people."""


def superseded_error(supplier: str, now: CurrentPointer | None) -> RunFailed:
    current = f"{now.run_id} is current (fence {now.fence})" if now else "the state is gone"
    return RunFailed(
        FailureCode.SUPERSEDED,
        f"another run published {supplier} meanwhile: {current}",
        "nothing is to be done: the file is looked at again by the next run",
    )


def parse_pointer(content: bytes, where: str) -> CurrentPointer:
    """The pointer that is written there; Corrupt POINTER_DAMAGED when it is none."""
    try:
        told = orjson.loads(content)
        # A later release may tell more.
        return CurrentPointer(**{field.name: told[field.name] for field in fields(CurrentPointer)})
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        hint = "restore it from a backup; state_store keeps a pointer.json beside every state"
        raise Corrupt("POINTER_DAMAGED", f"{where} is no pointer: {error}", hint=hint) from error


def is_supplier_name(name: str) -> bool:
    with suppress(Invalid):
        return bool(check_supplier_name(name))
    return False
