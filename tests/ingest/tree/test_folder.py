"""Tests of the guarantees of the folder: read-only states, links, open files."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.ingest.tree import paths
from penstock.ingest.tree.port import FileChanged
from penstock.kernel.errors import NotFound
from tests.ingest.tree.arrivals import BROKEN, INBOX, arrived, published, sha256
from tests.ingest.tree_backends import SUPPLIER, FolderBackend, drop, stored_paths


def test_a_name_of_another_encoding_is_escaped(folder: FolderBackend) -> None:
    """I2, I8: a name that is not UTF-8 is escaped for JSON, and the file is found by the escaped name."""
    raw = os.fsdecode("Прайс.csv".encode("cp1251"))
    drop(folder, raw, b"x")
    [found] = folder.tree.list_arrivals(SUPPLIER)
    assert found.name == r"\xcf\xf0\xe0\xe9\xf1.csv"
    assert folder.tree.fetch(found) == sha256(b"x")
    assert folder.tree.move(found, BROKEN) == f"{BROKEN}/{found.name}"
    assert folder.tree.list_arrivals(SUPPLIER) == []


def test_a_published_state_is_read_only(folder: FolderBackend) -> None:
    """I11: a published state is read-only; the pointer is a relative link, so that the tree can be moved."""
    folder.tree.switch_pointer(SUPPLIER, published(folder, "first"), None)
    state = folder.root / paths.make_state_path(SUPPLIER, "first")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (state, *state.iterdir())] == [0o555, 0o444, 0o444]
    link = folder.root / paths.CURRENT / SUPPLIER
    assert not link.readlink().is_absolute()
    assert link.resolve() == state
    assert [path.name for path in link.parent.iterdir()] == [SUPPLIER]


def test_a_state_that_is_being_read_stays(folder: FolderBackend) -> None:
    """I12: a state is removed only after its last reader has closed it."""
    published(folder, "first")
    path = paths.make_state_path(SUPPLIER, "first")
    with folder.tree.open(f"{path}/{paths.FACTS}") as facts:
        assert not folder.tree.remove(path)
        assert facts.read() == b"first"
    assert folder.tree.remove(path)
    assert folder.tree.list_states(SUPPLIER) == []


@pytest.mark.parametrize("make", [os.symlink, os.link], ids=["symlink", "hard link"])
def test_links_in_the_inbox(folder: FolderBackend, tmp_path: Path, make: Callable[..., None]) -> None:
    """I3: a symbolic link is not followed; a hard link is a file."""
    (tmp_path / "secret").write_bytes(b"secret")
    make(tmp_path / "secret", folder.root / INBOX / "price.csv")
    assert [arrival.name for arrival in folder.tree.list_arrivals(SUPPLIER)] == (
        ["price.csv"] if make is os.link else []
    )


def test_a_file_that_becomes_a_link_is_not_followed(folder: FolderBackend, tmp_path: Path) -> None:
    """I3: a symbolic link that replaces a listed file is not followed."""
    found = arrived(folder)
    (tmp_path / "secret").write_bytes(b"content")
    (folder.root / INBOX / "price.csv").unlink()
    (folder.root / INBOX / "price.csv").symlink_to(tmp_path / "secret")
    with pytest.raises(FileChanged):
        folder.tree.fetch(found)
    assert folder.tree.move(found, BROKEN) is None
    assert stored_paths(folder.tree, BROKEN) == []


def test_a_missing_root_is_an_error(tmp_path: Path) -> None:
    """I1: a root that does not exist is not created, because its path may be mistyped."""
    with pytest.raises(NotFound) as missing:
        FolderBackend(tmp_path / "nowhere")
    assert missing.value.code == "ROOT_NOT_FOUND"
