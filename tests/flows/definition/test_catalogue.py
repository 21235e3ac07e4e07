"""The catalogue of named flows, from files that change and from modules."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.flows.config import FlowsSection
from penstock.flows.definition.catalogue import FlowCatalogue, FlowFileError
from penstock.flows.step import KindContext
from penstock.kernel.clock import ManualClock
from penstock.kernel.errors import BadConfig, NotFound
from tests.flows.definition.catalogue_folder import GOOD, CatalogueFolder


def test_flow_files_of_a_folder(folder: CatalogueFolder) -> None:
    """F15: the flows of a folder are its *.yaml and *.yml files."""
    folder.write_valid("one")
    folder.write("two.yml", GOOD.format(name="two"))
    folder.write("notes.txt", "name: three")
    folder.write(".hidden.yaml", "not: this")
    (folder.path / "inner.yaml").mkdir()
    catalogue = folder.open_catalogue()
    assert set(catalogue.list_flows()) == {"one", "two"}
    assert list(catalogue.get_flow("two").steps) == ["a", "b"]
    assert not catalogue.list_errors()
    with pytest.raises(NotFound, match="flow 'tow' does not exist") as caught:
        catalogue.get_flow("tow")
    assert (caught.value.code, caught.value.hint) == ("FLOW_NOT_FOUND", "did you mean 'two'?")


def test_changed_files_are_loaded(folder: CatalogueFolder) -> None:
    """F15: new, changed and deleted files take effect within a second."""
    file = folder.write_valid("one")
    catalogue = folder.open_catalogue()
    folder.write_valid("two")
    file.write_text(GOOD.format(name="one") + "  c: {kind: http}\n")
    assert set(catalogue.list_flows()) == {"one"}, "the folder was scanned within the second"
    folder.advance_to_next_scan()
    assert list(catalogue.get_flow("one").steps) == ["a", "b", "c"]
    assert set(catalogue.list_flows()) == {"one", "two"}
    file.unlink()
    folder.advance_to_next_scan()
    assert set(catalogue.list_flows()) == {"two"}


def test_unchanged_file_is_parsed_once(folder: CatalogueFolder) -> None:
    """F15: a scan does not parse unchanged files."""
    folder.write_valid("one")
    catalogue = folder.open_catalogue()
    before = catalogue.get_flow("one")
    folder.advance_to_next_scan()
    assert catalogue.get_flow("one") is before


def test_invalid_file_keeps_its_last_valid_flow(folder: CatalogueFolder) -> None:
    """F15: an invalid file keeps its last valid flow, and reports its error until it is fixed."""
    file = folder.write_valid("one")
    catalogue = folder.open_catalogue()
    file.write_text("name: one\nsteps:\n  a: {kind: http, dependsOn: [b]}\n")
    folder.advance_to_next_scan()
    assert list(catalogue.get_flow("one").steps) == ["a", "b"]
    error = catalogue.list_errors()[str(file)]
    assert "depends on 'b', which does not exist" in error.message
    assert error.message.startswith(f"{file}:3:19: ")
    assert error.line == 3
    file.write_text(GOOD.format(name="one"))
    folder.advance_to_next_scan()
    assert not catalogue.list_errors()
    invalid = folder.write("bad.yaml", "name: [")
    folder.advance_to_next_scan()
    assert set(catalogue.list_errors()) == {str(invalid)}
    assert set(catalogue.list_flows()) == {"one"}


def test_changes_of_files_are_logged(folder: CatalogueFolder) -> None:
    """F15: new, changed and removed flows, and each new error of a file, are logged once and not on every scan."""
    file = folder.write_valid("one")
    with capture_logs() as log:
        catalogue = folder.open_catalogue()
        folder.advance_to_next_scan()
        catalogue.list_flows()
        assert log == [loaded(1, changed=["one"])]
        log.clear()
        file.write_text("name: one\nsteps:\n  a: {kynd: http}\n")
        for _ in range(3):
            folder.advance_to_next_scan()
            catalogue.list_flows()
        (entry,) = log
        assert (entry["event"], entry["log_level"], entry["file"]) == ("flow_file_invalid", "warning", str(file))
        assert (entry["line"], entry["error"]) == (3, catalogue.list_errors()[str(file)].message)
        log.clear()
        file.unlink()
        folder.write_valid("two")
        folder.advance_to_next_scan()
        catalogue.list_flows()
        assert log == [loaded(1, changed=["two"], removed=["one"])]


def test_missing_folder_is_logged(folder: CatalogueFolder) -> None:
    """F15: a missing `flows.folder` is a warning at start."""
    folder.path.rmdir()
    with capture_logs() as log:
        folder.open_catalogue()
    error = f"the folder {folder.path} of `flows.folder` does not exist"
    warning = {"event": "flows_folder_missing", "log_level": "warning", "folder": str(folder.path), "error": error}
    assert log == [warning]


def loaded(flows: int, changed: Sequence[str] = (), removed: Sequence[str] = ()) -> dict[str, Any]:
    """Return the log entry of loaded flows."""
    names = {"changed": list(changed), "removed": list(removed)}
    return {"event": "flows_loaded", "log_level": "info", "flows": flows, **names}


def test_duplicate_name(folder: CatalogueFolder) -> None:
    """F15: of two files with the same flow name the first one is used; the other reports an error."""
    folder.write_valid("one")
    other = folder.write("other.yaml", "name: one\n")
    catalogue = folder.open_catalogue()
    assert len(catalogue.get_flow("one").steps) == 2
    assert catalogue.list_errors() == {str(other): FlowFileError("flow 'one' is already defined in one.yaml")}


def test_recursive_flows_are_refused(folder: CatalogueFolder) -> None:
    """F14: the flow that makes a chain of sub-flows recursive is refused."""
    inner = "name: {name}\nsteps:\n  s: {{kind: flow, inputs: {{flow: {flow}}}}}\n"
    hidden = "name: c\nsteps:\n  s: {kind: flow, inputs: {steps: {t: {kind: flow, inputs: {flow: a}}}}}\n"
    folder.write("a.yaml", inner.format(name="a", flow="b"))
    folder.write("b.yaml", inner.format(name="b", flow="c"))
    closing = folder.write("c.yaml", hidden)
    alone = folder.write("d.yaml", inner.format(name="d", flow="d"))
    folder.write("e.yaml", inner.format(name="e", flow="a"))
    catalogue = folder.open_catalogue()
    assert set(catalogue.list_flows()) == {"a", "b", "e"}
    assert catalogue.list_errors() == {
        str(closing): FlowFileError("flow c contains itself: c → a → b → c"),
        str(alone): FlowFileError("flow d contains itself: d → d"),
    }
    closing.write_text(GOOD.format(name="c"))
    folder.advance_to_next_scan()
    assert set(catalogue.list_flows()) == {"a", "b", "c", "e"}


def test_recursive_flows_of_modules(folder: CatalogueFolder, modules: Path) -> None:
    """F14: recursive flows of modules are refused at start."""
    (modules / "round_flows.py").write_text(
        "from penstock.flows.definition.python_dsl import Flow\na, b = Flow('a'), Flow('b')\n"
        "a.step('s', 'flow', inputs={'flow': 'b'})\nb.step('s', 'flow', inputs={'flow': 'a'})\n"
    )
    with pytest.raises(BadConfig, match="flow a contains itself: a → b → a") as caught:
        folder.open_catalogue(modules=["round_flows"])
    assert caught.value.code == "FLOW_RECURSION"


def test_links_out_of_the_folder_are_refused(folder: CatalogueFolder, tmp_path: Path) -> None:
    """F15: a link to a file outside the folder is refused; a link within the folder is valid."""
    outside = tmp_path / "secret.yaml"
    outside.write_text(GOOD.format(name="secret"))
    (folder.path / "out.yaml").symlink_to(outside)
    (folder.path / "dead.yaml").symlink_to(folder.path / "nowhere.yaml")
    target = folder.write("target.txt", GOOD.format(name="target"))
    (folder.path / "in.yaml").symlink_to(target)
    catalogue = folder.open_catalogue()
    assert set(catalogue.list_flows()) == {"target"}
    assert {Path(file).name for file in catalogue.list_errors()} == {"out.yaml", "dead.yaml"}
    assert "leads out of the folder" in catalogue.list_errors()[str(folder.path / "out.yaml")].message


def test_pipe_is_ignored(folder: CatalogueFolder) -> None:
    """F15: a pipe in the folder does not block the catalogue."""
    os.mkfifo(folder.path / "pipe.yaml")
    assert not folder.open_catalogue().list_flows()


def test_missing_folder(folder: CatalogueFolder) -> None:
    """F15: if the folder is missing, loaded flows stay and the error is reported; a later folder is read."""
    folder.write_valid("one")
    catalogue = folder.open_catalogue()
    folder.path.rename(folder.path.with_name("away"))
    folder.advance_to_next_scan()
    assert set(catalogue.list_flows()) == {"one"}
    assert "does not exist" in catalogue.list_errors()[str(folder.path)].message
    early = folder.open_catalogue()
    assert not early.list_flows()
    folder.path.with_name("away").rename(folder.path)
    folder.advance_to_next_scan()
    assert set(early.list_flows()) == {"one"}
    assert not early.list_errors()


def test_no_flows(clock: ManualClock) -> None:
    """F15: a configuration without flows is valid."""
    catalogue = FlowCatalogue(FlowsSection(), clock)
    assert not catalogue.list_flows()
    assert not catalogue.list_errors()


def test_flows_and_workers_of_modules(folder: CatalogueFolder, modules: Path) -> None:
    """F15, F17: flows and workers at module level are loaded; they have priority over files."""
    (modules / "own_flows.py").write_text(
        "from penstock.flows.definition.python_dsl import Flow\n"
        "from penstock.flows.definition.spec import FlowSpec\n"
        "from penstock.flows.step import Workers\n"
        "built = Flow('built')\n"
        "built.step('a', 'http')\n"
        "same = built\n"
        "given = FlowSpec(name='given')\n"
        "workers = Workers()\n"
    )
    file = folder.write_valid("built")
    catalogue = folder.open_catalogue(modules=["own_flows"])
    assert {name: len(flow.steps) for name, flow in catalogue.list_flows().items()} == {"built": 1, "given": 0}
    assert len(catalogue.workers) == 1
    assert catalogue.list_errors() == {str(file): FlowFileError("flow 'built' is already defined in a module")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def make_workers(context): return context.colour\n", "make_workers: AttributeError: "),
        ("def make_workers(): return Workers()\n", "make_workers: TypeError: "),
        ("make_workers = Workers()\n", "make_workers: TypeError: "),
        ("def make_workers(context): return None\n", "make_workers must return new Workers, without checks"),
        (
            "def make_workers(context):\n  new = Workers()\n  new.declare('X', check_inputs=print)\n  return new\n",
            "make_workers must return new Workers, without checks",
        ),
    ],
)
def test_errors_of_make_workers(modules: Path, text: str, message: str) -> None:
    """F17: an error of `make_workers` has the name of the module, and is raised when workers start."""
    (modules / "bad_makers.py").write_text(f"from penstock.flows.step import Workers\n{text}")
    section = FlowsSection(modules=["bad_makers"])
    catalogue = FlowCatalogue(section)
    with pytest.raises(BadConfig) as caught:
        catalogue.make_workers(KindContext(section))
    assert caught.value.code == "FLOW_MODULE"
    assert caught.value.message.startswith(f"bad_makers: {message}")
