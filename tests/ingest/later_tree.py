"""A tree on a disk whose clock a test can move."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from penstock.ingest.model import InboxFile
from penstock.ingest.tree.folder import FolderTree
from tests.ingest.supplier_folder import Facts

WINDOW = 30.0
FIRST: Facts = {"A": 1}
NEW: Facts = {"A": 2}


class LaterTree(FolderTree):
    """A tree on a disk whose clock a test can move; files are dated by that clock."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.later = 0.0
        self._written: dict[str | None, tuple[str, float]] = {}

    def read_clock(self) -> float:
        return super().read_clock() + self.later

    def list_arrivals(self, supplier: str) -> list[InboxFile]:
        return [self._dated(arrival) for arrival in super().list_arrivals(supplier)]

    def _dated(self, arrival: InboxFile) -> InboxFile:
        if self._written.get(arrival.identity, ("", 0.0))[0] != arrival.signature:
            self._written[arrival.identity] = (arrival.signature, self.later)
        assert arrival.changed_at is not None
        later = timedelta(seconds=self._written[arrival.identity][1])
        return replace(arrival, changed_at=arrival.changed_at + later)
