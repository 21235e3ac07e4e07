"""Readers during publications and deletions: each reads one complete state, and never an older one than before."""

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
from tests.ingest.crash_process import start_process, was_killed
from tests.ingest.state.reader_process import READERS, count_facts, read_once, read_until_stopped
from tests.ingest.supplier_folder import SUPPLIER, SupplierFolder, csv, open_fast_folder
from tests.support.soak import Campaign, examples

AT_ONCE = IngestRetentionSection(state_retention_hours=0)


@pytest.fixture
def supplier() -> Iterator[SupplierFolder]:
    with open_fast_folder() as folder:
        yield SupplierFolder(folder)


def publish(supplier: SupplierFolder, fence: int) -> None:
    supplier.drop("new.csv", csv({f"S{number}": fence for number in range(count_facts(fence))}), at=fence)
    outcome = supplier.run()
    assert outcome.manifest is not None
    assert outcome.manifest.fence == fence


def publish_many(supplier: SupplierFolder, states: int) -> None:
    """Publish state after state; delete each one that is replaced and not being read."""
    for fence in range(2, states + 2):
        publish(supplier, fence)
        supplier.sweep(AT_ONCE)


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
def test_readers_in_other_processes(supplier: SupplierFolder, campaign: Campaign) -> None:
    """I11, I12, I14: during publications and deletions, readers in other processes read complete states."""
    publish(supplier, 1)
    states = campaign.rounds = examples(24, soak=1000)
    readers = [start_reader(supplier.root, reader) for reader in (*READERS, *READERS)]
    publish_many(supplier, states)
    for connection, process in readers:
        connection.send("stop")
        reads, seen, last = connection.recv()
        assert not was_killed(process)
        connection.close()
        assert reads >= seen > 1
        assert last == states + 1
    supplier.sweep(AT_ONCE)
    assert len(supplier.tree.list_states(SUPPLIER)) == 1
    supplier.check_consistency()


def start_reader(root: Path, reader: str) -> tuple[Connection, ForkServerProcess]:
    """Start a reader, and wait for its first message."""
    connection, child_connection = Pipe()
    process = start_process(read_until_stopped, root, reader, child_connection)
    child_connection.close()
    assert connection.recv() == "reading"
    return connection, process


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@pytest.mark.parametrize("reader", READERS)
def test_readers_in_threads(supplier: SupplierFolder, reader: str, campaign: Campaign) -> None:
    """I11, I14: during publications, readers in threads of one process read complete states."""
    publish(supplier, 1)
    states = campaign.rounds = examples(8, soak=100)
    is_over = threading.Event()

    def read() -> int:
        last = 0
        while not is_over.is_set():
            last = read_once(supplier.root, reader, last)
        return read_once(supplier.root, reader, last)

    with ThreadPoolExecutor(3) as readers:
        reading: list[Future[int]] = [readers.submit(read) for _ in range(3)]
        try:
            publish_many(supplier, states)
        finally:
            is_over.set()
        assert {future.result() for future in reading} == {states + 1}


@pytest.mark.parametrize("reader", READERS)
def test_state_that_is_read_is_not_deleted(supplier: SupplierFolder, reader: str) -> None:
    """I12: a state that is open for reading is retained and reported, and is deleted after it is closed."""
    publish(supplier, 1)
    with READERS[reader](supplier.root) as state:
        publish(supplier, 2)
        [retained] = supplier.sweep(AT_ONCE).expired
        assert not retained.is_deleted
        assert "it is being read" in retained.reason
        assert len(list(state)) == count_facts(1)
    [deleted] = supplier.sweep(AT_ONCE).expired
    assert deleted.is_deleted
    assert deleted.path == paths.make_state_path(SUPPLIER, state.pointer.run_id)


def test_state_deleted_after_its_pointer_was_read(supplier: SupplierFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """I12, I14: if the state was replaced and deleted since the pointer was read, the reader gets the next state."""
    publish(supplier, 1)
    opened = FolderTree.open

    def late(tree: FolderTree, path: str) -> object:
        monkeypatch.undo()
        publish(supplier, 2)
        supplier.sweep(AT_ONCE)
        return opened(tree, path)

    monkeypatch.setattr(FolderTree, "open", late)
    assert read_once(supplier.root, "sdk", 0) == 2


def test_state_deleted_while_its_pointer_is_read(supplier: SupplierFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """I12, I14: if the state is replaced and deleted while its pointer is read, the reader gets the next pointer."""
    publish(supplier, 1)
    read = FolderTree.read

    def late(tree: FolderTree, path: str) -> bytes | None:
        monkeypatch.undo()
        publish(supplier, 2)
        supplier.sweep(AT_ONCE)
        return read(tree, path)

    monkeypatch.setattr(FolderTree, "read", late)
    assert find_pointer(supplier.tree, SUPPLIER).fence == 2


def test_lost_state_is_an_error(supplier: SupplierFolder) -> None:
    """I14: a missing or damaged state is an error with a code; no other state is served."""
    with pytest.raises(NotFound) as unpublished, read_state(supplier.root, SUPPLIER):
        pass
    assert unpublished.value.code == "STATE_NOT_FOUND"
    publish(supplier, 1)
    pointer = supplier.pointer()
    assert pointer is not None
    folder = supplier.root / paths.make_state_path(SUPPLIER, pointer.run_id)
    facts = folder / paths.FACTS
    facts.chmod(0o644)
    facts.write_bytes(facts.read_bytes().replace(b"S1", b"S2"))
    with pytest.raises(Corrupt) as damaged, read_state(supplier.root, SUPPLIER):
        pass
    assert damaged.value.code == "STATE_DAMAGED"
    folder.chmod(0o755)
    facts.unlink()
    with pytest.raises(NotFound) as missing, read_state(supplier.root, SUPPLIER):
        pass
    assert missing.value.code == "OBJECT_NOT_FOUND"
    (folder / paths.POINTER).unlink()
    with pytest.raises(Corrupt) as lost, read_state(supplier.root, SUPPLIER):
        pass
    assert lost.value.code == "STATE_MISSING"
