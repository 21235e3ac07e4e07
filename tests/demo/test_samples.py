"""The sample files."""

import json
from pathlib import Path

from penstock.demo.samples import FOLDER, list_samples
from tests.pages import ROOT
from tests.support.processes import penstock_here


def test_sample_files_are_written_into_a_new_folder(tmp_path: Path) -> None:
    """`--files` writes an exact copy of every sample file, lists them, and does not overwrite anything."""
    done = penstock_here("demo", "--files", "samples", "--json", cwd=tmp_path)
    written = [str(Path("samples") / sample) for sample in list_samples()]
    assert json.loads(done.out) == {"files": written}
    assert len(written) == 7
    for sample in list_samples():
        assert (tmp_path / "samples" / sample).read_bytes() == (FOLDER / sample).read_bytes()
    again = penstock_here("demo", "--files", "samples", cwd=tmp_path)
    assert (again.code, again.out) == (6, "")
    assert "samples is not empty" in again.err


def test_sample_files_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    """A folder that cannot be created gives an error code and no traceback."""
    (tmp_path / "taken").write_text("a file")
    done = penstock_here("demo", "--files", str(tmp_path / "taken" / "samples"), "--json")
    assert done.code == 3
    assert json.loads(done.err)["error"]["code"] == "DEMO_FOLDER_UNUSABLE"


def test_candles_are_equal_to_those_of_the_example() -> None:
    """The candles of the demo and of examples/market-report are the same file."""
    assert (FOLDER / "files" / "candles.csv").read_bytes() == (
        ROOT / "examples" / "market-report" / "candles.csv"
    ).read_bytes()
