"""Readers while states are published and removed: each sees one whole state, and never an older one than before."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from penstock.ingest.config import IngestRetentionSection
from penstock.ingest.sdk import read_state
from penstock.ingest.state.reader import find_pointer
from penstock.ingest.tree import paths
from penstock.ingest.tree.folder import FolderTree
from penstock.kernel.errors import Corrupt, NotFound
from tests.ingest.crash_process import started, was_killed
from tests.ingest.state.reader_process import WAYS, count_of, read_on, read_once
from tests.ingest.supplier_folder import SUPPLIER, SupplierFolder, csv, quick_folder
from tests.support.soak import Campaign, examples

AT_ONCE = IngestRetentionSection(state_retention_hours=0)


@pytest.fixture
def supplier() -> Iterator[SupplierFolder]:
    with quick_folder() as folder:
        yield SupplierFolder(folder)


def publish(supplier: SupplierFolder, fence: int) -> None:
    supplier.drop("new.csv", csv({f"S{number}": fence for number in range(count_of(fence))}), at=fence)
    outcome = supplier.run()
    assert outcome.manifest is not None
    assert outcome.manifest.fence == fence


def publish_many(supplier: SupplierFolder, states: int) -> None:
    """State after state, each removed as soon as the next is there and nobody reads it."""
    for fence in range(2, states + 2):
        publish(supplier, fence)
        supplier.sweep(AT_ONCE)


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
def test_readers_in_other_processes(supplier: SupplierFolder, campaign: Campaign) -> None:
    """I11, I12, I14: whatever is published and removed meanwhile, a reader gets one whole state, and no error."""
    publish(supplier, 1)
    states = campaign.rounds = examples(24, soak=1000)
    readers = [started_reader(supplier.root, way) for way in (*WAYS, *WAYS)]
    publish_many(supplier, states)
    for ours, process in readers:
        ours.send("stop")
        reads, seen, last = ours.recv()
        assert not was_killed(process)
        ours.close()
        assert reads >= seen > 1
        assert last == states + 1
    supplier.sweep(AT_ONCE)
    assert len(supplier.tree.list_states(SUPPLIER)) == 1
    supplier.check_all_is_well()


def started_reader(root: Path, way: str) -> tuple[Connection, ForkServerProcess]:
    """A reader that has begun."""
    ours, theirs = Pipe()
    process = started(read_on, root, way, theirs)
    theirs.close()
    assert ours.recv() == "reading"
    return ours, process


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@pytest.mark.parametrize("way", WAYS)
def test_readers_in_threads(supplier: SupplierFolder, way: str, campaign: Campaign) -> None:
    """I11, I14: readers of one process, too."""
    publish(supplier, 1)
    states = campaign.rounds = examples(8, soak=100)
    is_over = threading.Event()

    def read() -> int:
        last = 0
        while not is_over.is_set():
            last = read_once(supplier.root, way, last)
        return read_once(supplier.root, way, last)

    with ThreadPoolExecutor(3) as readers:
        reading: list[Future[int]] = [readers.submit(read) for _ in range(3)]
        try:
            publish_many(supplier, states)
        finally:
            is_over.set()
        assert {one.result() for one in reading} == {states + 1}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_read_is_not_removed(supplier: SupplierFolder, way: str) -> None:
    """I12: a state that somebody has open stays, is told of, and goes when it is closed."""
    publish(supplier, 1)
    with WAYS[way](supplier.root) as state:
        publish(supplier, 2)
        [kept] = supplier.sweep(AT_ONCE).expired
        assert not kept.is_deleted
        assert "it is being read" in kept.reason
        assert len(list(state)) == count_of(1)
    [gone] = supplier.sweep(AT_ONCE).expired
    assert gone.is_deleted
    assert gone.path == paths.state(SUPPLIER, state.pointer.run_id)


def test_a_state_removed_between_the_look_and_the_opening(
    supplier: SupplierFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I12, I14: the pointer that was resolved leads nowhere by now: the reader gets the next state, not an error."""
    publish(supplier, 1)
    opened = FolderTree.open

    def late(tree: FolderTree, path: str) -> object:
        monkeypatch.undo()
        publish(supplier, 2)
        supplier.sweep(AT_ONCE)
        return opened(tree, path)

    monkeypatch.setattr(FolderTree, "open", late)
    assert read_once(supplier.root, "sdk", 0) == 2


def test_a_state_removed_amid_the_look(supplier: SupplierFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """I12, I14: the link that was read leads nowhere by now: nor is the state lost then."""
    publish(supplier, 1)
    read = FolderTree.read

    def late(tree: FolderTree, path: str) -> bytes | None:
        monkeypatch.undo()
        publish(supplier, 2)
        supplier.sweep(AT_ONCE)
        return read(tree, path)

    monkeypatch.setattr(FolderTree, "read", late)
    assert find_pointer(supplier.tree, SUPPLIER).fence == 2


def test_a_state_that_is_really_lost_is_told(supplier: SupplierFolder) -> None:
    """I14: where there is nothing newer, the reader is told that it is gone, or damaged; nothing else is served."""
    with pytest.raises(NotFound) as nothing, read_state(supplier.root, SUPPLIER):
        pass
    assert nothing.value.code == "STATE_NOT_FOUND"
    publish(supplier, 1)
    pointer = supplier.pointer()
    assert pointer is not None
    folder = supplier.root / paths.state(SUPPLIER, pointer.run_id)
    facts = folder / paths.FACTS
    facts.chmod(0o644)
    facts.write_bytes(facts.read_bytes().replace(b"S1", b"S2"))
    with pytest.raises(Corrupt) as damaged, read_state(supplier.root, SUPPLIER):
        pass
    assert damaged.value.code == "STATE_DAMAGED"
    folder.chmod(0o755)
    facts.unlink()
    with pytest.raises(NotFound) as gone, read_state(supplier.root, SUPPLIER):
        pass
    assert gone.value.code == "OBJECT_NOT_FOUND"
    (folder / paths.POINTER).unlink()
    with pytest.raises(Corrupt) as lost, read_state(supplier.root, SUPPLIER):
        pass
    assert lost.value.code == "STATE_MISSING"
