"""The data directory: one process, one format, and no damage by a crash."""

from pathlib import Path

import pytest

from penstock.kernel.db import datadir
from penstock.kernel.db.datadir import FORMAT, check_format, lock_data_dir
from penstock.kernel.errors import BadConfig, Conflict, Corrupt


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.name != "lock"}


def test_a_folder_is_created_and_marked_with_its_format(tmp_path: Path) -> None:
    """The first start creates the folder, and the second leaves it unchanged."""
    for _ in range(2):
        with lock_data_dir(tmp_path / "a" / "b", "me") as folder:
            assert folder == tmp_path / "a" / "b"
    assert contents(folder) == {"FORMAT": f"{FORMAT}\n".encode()}


def test_a_folder_is_used_by_one_process(tmp_path: Path) -> None:
    """I4: the error of a second process names the holder of the lock."""
    with (
        lock_data_dir(tmp_path, "first"),
        pytest.raises(Conflict, match="is locked by first"),
        lock_data_dir(tmp_path, "second"),
    ):
        pass


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    """A folder of a newer release is Conflict DATA_NEWER, and nothing in it is changed."""
    (tmp_path / "FORMAT").write_text(f"{FORMAT + 1}\n")
    (tmp_path / "data").write_text("precious")
    before = contents(tmp_path)
    with pytest.raises(Conflict) as newer, lock_data_dir(tmp_path, "me"):
        pass
    assert newer.value.code == "DATA_NEWER"
    assert contents(tmp_path) == before
    (tmp_path / "FORMAT").write_text(f"{FORMAT}\n")
    with lock_data_dir(tmp_path, "me"):
        pass


@pytest.mark.parametrize("content", [b"", b"one\n", b"\xff", b"1.5"])
def test_an_unreadable_format_is_corrupt(tmp_path: Path, content: bytes) -> None:
    """A format file without a number is an error."""
    (tmp_path / "FORMAT").write_bytes(content)
    for call in (lambda: lock_data_dir(tmp_path, "me").__enter__(), lambda: check_format(tmp_path)):
        with pytest.raises(Corrupt) as corrupt:
            call()
        assert corrupt.value.code == "DATA_FORMAT_UNKNOWN"
    assert contents(tmp_path) == {"FORMAT": content}


def test_a_crash_while_writing_leaves_the_format_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start can read the format, at whatever moment the process was killed."""
    with lock_data_dir(tmp_path, "me"):
        pass

    def torn(self: Path, _: str) -> int:
        self.write_bytes(b"")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", torn)
        with pytest.raises(KeyboardInterrupt), lock_data_dir(tmp_path, "me"):
            pass
    with lock_data_dir(tmp_path, "me"):
        check_format(tmp_path)


@pytest.mark.parametrize("name", ["file", "file/below", "a\0b", "x" * 300])
def test_an_unusable_folder_is_a_configuration_error(tmp_path: Path, name: str) -> None:
    """A file with the name of the folder, or a name that no folder can have, is BadConfig."""
    (tmp_path / "file").write_text("")
    with pytest.raises(BadConfig) as unusable, lock_data_dir(tmp_path / name, "me"):
        pass
    assert unusable.value.code == "DATA_DIR_UNUSABLE"


def test_errors_of_the_program_pass_unchanged(tmp_path: Path) -> None:
    """An error of the program that uses the folder is not translated into an error of the folder."""
    with pytest.raises(PermissionError, match="something else"), lock_data_dir(tmp_path, "me"):
        raise PermissionError("something else")
    with datadir.lock_data_dir(tmp_path, "me"):
        pass
