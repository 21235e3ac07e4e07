"""Named flows: from files that change while we look, and from modules."""

import os
from pathlib import Path

import pytest

from penstock.flows.config import FlowsSection
from penstock.flows.definition.catalogue import FlowCatalogue
from penstock.flows.step import KindContext
from penstock.kernel.clock import ManualClock
from penstock.kernel.errors import BadConfig, NotFound
from tests.flows.definition.catalogue_folder import GOOD, CatalogueFolder


def test_flows_have_names(folder: CatalogueFolder) -> None:
    """F15: *.yaml and *.yml of a folder, and no others."""
    folder.good("one")
    folder.write("two.yml", GOOD.format(name="two"))
    folder.write("notes.txt", "name: three")
    folder.write(".hidden.yaml", "not: this")
    (folder.path / "inner.yaml").mkdir()
    found = folder.catalogue()
    assert set(found.list_flows()) == {"one", "two"}
    assert list(found.get_flow("two").steps) == ["a", "b"]
    assert not found.list_errors()
    with pytest.raises(NotFound, match="there is no flow 'tow'") as caught:
        found.get_flow("tow")
    assert (caught.value.code, caught.value.hint) == ("FLOW_NOT_FOUND", "did you mean 'two'?")


def test_a_folder_is_read_again_when_it_changes(folder: CatalogueFolder) -> None:
    """F15: new files, changed ones and gone ones, a second later at most."""
    one = folder.good("one")
    found = folder.catalogue()
    folder.good("two")
    one.write_text(GOOD.format(name="one") + "  c: {kind: http}\n")
    assert set(found.list_flows()) == {"one"}, "looked at within the second"
    folder.later()
    assert list(found.get_flow("one").steps) == ["a", "b", "c"]
    assert set(found.list_flows()) == {"one", "two"}
    one.unlink()
    folder.later()
    assert set(found.list_flows()) == {"two"}


def test_a_file_is_parsed_once(folder: CatalogueFolder) -> None:
    """F15: looking again costs a stat, while nothing changed."""
    folder.good("one")
    found = folder.catalogue()
    before = found.get_flow("one")
    folder.later()
    assert found.get_flow("one") is before


def test_a_file_that_turns_bad_keeps_its_flow(folder: CatalogueFolder) -> None:
    """F15: runs go on being made of what was good last; what is wrong can be seen, until it is mended."""
    one = folder.good("one")
    found = folder.catalogue()
    one.write_text("name: one\nsteps:\n  a: {kind: http, dependsOn: [b]}\n")
    folder.later()
    assert list(found.get_flow("one").steps) == ["a", "b"]
    assert "depends on 'b', which is not there" in found.list_errors()[str(one)]
    assert f"{one}:3:19: " in found.list_errors()[str(one)]
    one.write_text(GOOD.format(name="one"))
    folder.later()
    assert not found.list_errors()
    bad = folder.write("bad.yaml", "name: [")
    folder.later()
    assert set(found.list_errors()) == {str(bad)}
    assert set(found.list_flows()) == {"one"}


def test_a_name_belongs_to_one_file(folder: CatalogueFolder) -> None:
    """F15: the first by the files' names; the other is told."""
    folder.good("one")
    other = folder.write("other.yaml", "name: one\n")
    found = folder.catalogue()
    assert len(found.get_flow("one").steps) == 2
    assert found.list_errors() == {str(other): "there is a flow 'one' in one.yaml already"}


def test_flows_do_not_lead_back_to_each_other(folder: CatalogueFolder) -> None:
    """F14: two that wait for each other's turn would wait for ever; the one that closes the circle is refused."""
    inner = "name: {name}\nsteps:\n  s: {{kind: flow, inputs: {{flow: {flow}}}}}\n"
    hidden = "name: c\nsteps:\n  s: {kind: flow, inputs: {steps: {t: {kind: flow, inputs: {flow: a}}}}}\n"
    folder.write("a.yaml", inner.format(name="a", flow="b"))
    folder.write("b.yaml", inner.format(name="b", flow="c"))
    closing = folder.write("c.yaml", hidden)
    alone = folder.write("d.yaml", inner.format(name="d", flow="d"))
    folder.write("e.yaml", inner.format(name="e", flow="a"))
    found = folder.catalogue()
    assert set(found.list_flows()) == {"a", "b", "e"}
    assert found.list_errors() == {
        str(closing): "flow c would run within itself: c → a → b → c",
        str(alone): "flow d would run within itself: d → d",
    }
    closing.write_text(GOOD.format(name="c"))
    folder.later()
    assert set(found.list_flows()) == {"a", "b", "c", "e"}


def test_modules_do_not_lead_back_to_themselves(folder: CatalogueFolder, modules: Path) -> None:
    """F14: at start."""
    (modules / "round_flows.py").write_text(
        "from penstock.flows.definition.python_dsl import Flow\na, b = Flow('a'), Flow('b')\n"
        "a.step('s', 'flow', inputs={'flow': 'b'})\nb.step('s', 'flow', inputs={'flow': 'a'})\n"
    )
    with pytest.raises(BadConfig, match="flow a would run within itself: a → b → a") as caught:
        folder.catalogue(modules=["round_flows"])
    assert caught.value.code == "FLOW_RECURSION"


def test_links_stay_inside(folder: CatalogueFolder, tmp_path: Path) -> None:
    """F15: a link to a flow outside the folder is refused, one within is a file like others."""
    outside = tmp_path / "secret.yaml"
    outside.write_text(GOOD.format(name="secret"))
    (folder.path / "out.yaml").symlink_to(outside)
    (folder.path / "dead.yaml").symlink_to(folder.path / "nowhere.yaml")
    target = folder.write("kept.txt", GOOD.format(name="kept"))
    (folder.path / "in.yaml").symlink_to(target)
    found = folder.catalogue()
    assert set(found.list_flows()) == {"kept"}
    assert {Path(file).name for file in found.list_errors()} == {"out.yaml", "dead.yaml"}
    assert found.list_errors()[str(folder.path / "out.yaml")] == "leads out of the folder"


def test_what_is_no_file_is_not_waited_for(folder: CatalogueFolder) -> None:
    """F15: a pipe in the folder holds nobody up."""
    os.mkfifo(folder.path / "pipe.yaml")
    assert not folder.catalogue().list_flows()


def test_a_folder_that_is_away(folder: CatalogueFolder) -> None:
    """F15: what was read stays; the trouble is told; one that comes later is read."""
    folder.good("one")
    found = folder.catalogue()
    folder.path.rename(folder.path.with_name("away"))
    folder.later()
    assert set(found.list_flows()) == {"one"}
    assert "cannot be read" in found.list_errors()[str(folder.path)]
    early = folder.catalogue()
    assert not early.list_flows()
    folder.path.with_name("away").rename(folder.path)
    folder.later()
    assert set(early.list_flows()) == {"one"}
    assert not early.list_errors()


def test_no_flows_at_all(clock: ManualClock) -> None:
    """F15: nothing has to be configured."""
    found = FlowCatalogue(FlowsSection(), clock)
    assert not found.list_flows()
    assert not found.list_errors()


def test_modules_hold_flows_and_workers(folder: CatalogueFolder, modules: Path) -> None:
    """F15, F17: at the level of the module; they go before files."""
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
    file = folder.good("built")
    found = folder.catalogue(modules=["own_flows"])
    assert {name: len(flow.steps) for name, flow in found.list_flows().items()} == {"built": 1, "given": 0}
    assert len(found.workers) == 1
    assert found.list_errors() == {str(file): "there is a flow 'built' in a module already"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def make_workers(context): return context.colour\n", "make_workers: AttributeError: "),
        ("def make_workers(): return Workers()\n", "make_workers: TypeError: "),
        ("make_workers = Workers()\n", "make_workers: TypeError: "),
        ("def make_workers(context): return None\n", "make_workers must return new Workers, without checks"),
        (
            "def make_workers(context):\n  made = Workers()\n  made.declare('X', check_inputs=print)\n  return made\n",
            "make_workers must return new Workers, without checks",
        ),
    ],
)
def test_workers_that_cannot_be_made_are_told(modules: Path, text: str, said: str) -> None:
    """F17: with the name of the module, when workers are opened and not before."""
    (modules / "bad_makers.py").write_text(f"from penstock.flows.step import Workers\n{text}")
    section = FlowsSection(modules=["bad_makers"])
    found = FlowCatalogue(section)
    with pytest.raises(BadConfig) as caught:
        found.make_workers(KindContext(section))
    assert caught.value.code == "FLOW_MODULE"
    assert caught.value.message.startswith(f"bad_makers: {said}")
