"""Named flows: from files that change while we look, and from modules."""

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from penstock.flows.config import FlowsSection
from penstock.flows.definition.catalogue import Catalogue
from penstock.flows.definition.loader import load_file, load_module
from penstock.flows.step import KindContext
from penstock.kernel.clock import ManualClock
from penstock.kernel.errors import BadConfig, Invalid, NotFound

SECOND = timedelta(seconds=1)
GOOD = "name: {name}\nsteps:\n  a: {{kind: http}}\n  b: {{kind: http, dependsOn: [a]}}\n"


class CatalogueFolder:
    """A folder of flows, and a catalogue that looks at it."""

    def __init__(self, path: Path, clock: ManualClock) -> None:
        self.path, self._clock = path, clock

    def write(self, file: str, text: str) -> Path:
        (self.path / file).write_text(text)
        return self.path / file

    def good(self, name: str) -> Path:
        return self.write(f"{name}.yaml", GOOD.format(name=name))

    def catalogue(self, **section: object) -> Catalogue:
        return Catalogue(FlowsSection.model_validate({"folder": self.path, **section}), self._clock)

    def later(self) -> None:
        self._clock.advance(SECOND)


@pytest.fixture
def folder(tmp_path: Path, clock: ManualClock) -> CatalogueFolder:
    (tmp_path / "flows").mkdir()
    return CatalogueFolder(tmp_path / "flows", clock)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder Python imports from; what was imported there is forgotten."""
    known = set(sys.modules)
    (tmp_path / "modules").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    yield tmp_path / "modules"
    for name in set(sys.modules) - known:
        del sys.modules[name]


def told(path: Path) -> str:
    """What is wrong with a file, with FILE for its path."""
    with pytest.raises(BadConfig) as caught:
        load_file(path)
    return caught.value.message.replace(str(path), "FILE")


def test_flows_have_names(folder: CatalogueFolder) -> None:
    """F15: *.yaml and *.yml of a folder, and no others."""
    folder.good("one")
    folder.write("two.yml", GOOD.format(name="two"))
    folder.write("notes.txt", "name: three")
    folder.write(".hidden.yaml", "not: this")
    (folder.path / "inner.yaml").mkdir()
    found = folder.catalogue()
    assert set(found.flows()) == {"one", "two"}
    assert list(found.flow("two").steps) == ["a", "b"]
    assert not found.troubles()
    with pytest.raises(NotFound, match="there is no flow 'tow'") as caught:
        found.flow("tow")
    assert (caught.value.code, caught.value.hint) == ("FLOW_NOT_FOUND", "did you mean 'two'?")


def test_a_folder_is_read_again_when_it_changes(folder: CatalogueFolder) -> None:
    """F15: new files, changed ones and gone ones, a second later at most."""
    one = folder.good("one")
    found = folder.catalogue()
    folder.good("two")
    one.write_text(GOOD.format(name="one") + "  c: {kind: http}\n")
    assert set(found.flows()) == {"one"}, "looked at within the second"
    folder.later()
    assert list(found.flow("one").steps) == ["a", "b", "c"]
    assert set(found.flows()) == {"one", "two"}
    one.unlink()
    folder.later()
    assert set(found.flows()) == {"two"}


def test_a_file_is_parsed_once(folder: CatalogueFolder) -> None:
    """F15: looking again costs a stat, while nothing changed."""
    folder.good("one")
    found = folder.catalogue()
    before = found.flow("one")
    folder.later()
    assert found.flow("one") is before


def test_a_file_that_turns_bad_keeps_its_flow(folder: CatalogueFolder) -> None:
    """F15: runs go on being made of what was good last; what is wrong can be seen, until it is mended."""
    one = folder.good("one")
    found = folder.catalogue()
    one.write_text("name: one\nsteps:\n  a: {kind: http, dependsOn: [b]}\n")
    folder.later()
    assert list(found.flow("one").steps) == ["a", "b"]
    assert "depends on 'b', which is not there" in found.troubles()[str(one)]
    assert f"{one}:3:19: " in found.troubles()[str(one)]
    one.write_text(GOOD.format(name="one"))
    folder.later()
    assert not found.troubles()
    bad = folder.write("bad.yaml", "name: [")
    folder.later()
    assert set(found.troubles()) == {str(bad)}
    assert set(found.flows()) == {"one"}


def test_a_name_belongs_to_one_file(folder: CatalogueFolder) -> None:
    """F15: the first by the files' names; the other is told."""
    folder.good("one")
    other = folder.write("other.yaml", "name: one\n")
    found = folder.catalogue()
    assert len(found.flow("one").steps) == 2
    assert found.troubles() == {str(other): "there is a flow 'one' in one.yaml already"}


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
    assert set(found.flows()) == {"a", "b", "e"}
    assert found.troubles() == {
        str(closing): "flow c would run within itself: c → a → b → c",
        str(alone): "flow d would run within itself: d → d",
    }
    closing.write_text(GOOD.format(name="c"))
    folder.later()
    assert set(found.flows()) == {"a", "b", "c", "e"}


def test_modules_do_not_lead_back_to_themselves(folder: CatalogueFolder, modules: Path) -> None:
    """F14: at start."""
    (modules / "round_flows.py").write_text(
        "from penstock.flows.definition.python_dsl import Flow\na, b = Flow('a'), Flow('b')\n"
        "a.step('s', 'flow', inputs={'flow': 'b'})\nb.step('s', 'flow', inputs={'flow': 'a'})\n"
    )
    with pytest.raises(BadConfig, match="flow a would run within itself: a → b → a") as caught:
        folder.catalogue(modules=["round_flows"])
    assert caught.value.code == "FLOW_WITHIN_ITSELF"


def test_links_stay_inside(folder: CatalogueFolder, tmp_path: Path) -> None:
    """F15: a link to a flow outside the folder is refused, one within is a file like others."""
    outside = tmp_path / "secret.yaml"
    outside.write_text(GOOD.format(name="secret"))
    (folder.path / "out.yaml").symlink_to(outside)
    (folder.path / "dead.yaml").symlink_to(folder.path / "nowhere.yaml")
    target = folder.write("kept.txt", GOOD.format(name="kept"))
    (folder.path / "in.yaml").symlink_to(target)
    found = folder.catalogue()
    assert set(found.flows()) == {"kept"}
    assert {Path(file).name for file in found.troubles()} == {"out.yaml", "dead.yaml"}
    assert found.troubles()[str(folder.path / "out.yaml")] == "leads out of the folder"


def test_what_is_no_file_is_not_waited_for(folder: CatalogueFolder) -> None:
    """F15: a pipe in the folder holds nobody up."""
    os.mkfifo(folder.path / "pipe.yaml")
    assert not folder.catalogue().flows()


def test_a_folder_that_is_away(folder: CatalogueFolder) -> None:
    """F15: what was read stays; the trouble is told; one that comes later is read."""
    folder.good("one")
    found = folder.catalogue()
    folder.path.rename(folder.path.with_name("away"))
    folder.later()
    assert set(found.flows()) == {"one"}
    assert "cannot be read" in found.troubles()[str(folder.path)]
    early = folder.catalogue()
    assert not early.flows()
    folder.path.with_name("away").rename(folder.path)
    folder.later()
    assert set(early.flows()) == {"one"}
    assert not early.troubles()


def test_no_flows_at_all(clock: ManualClock) -> None:
    """F15: nothing has to be configured."""
    found = Catalogue(FlowsSection(), clock)
    assert not found.flows()
    assert not found.troubles()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: a\nname: b\n", 'FILE:2:1: not valid YAML: found duplicate key "name"'),
        ("name: f\nsteps:\n  a: {kind: x}\n  a: {kind: y}\n", 'FILE:4:3: not valid YAML: found duplicate key "a"'),
        ("name: f\nsteps:\n- {id: a, kind: x}\n- {id: a, kind: x}\n", "FILE:2:1: steps: step id 'a' comes twice"),
        ("name: f\nsteps:\n  a: {kind: x, dependOn: []}\n", "FILE:3:16: steps.a.dependOn: unknown key; did you mean"),
        ("name: f\nsteps:\n  a:\n    kind: x\n    when: foo\n", "FILE:5:5: steps.a.when: step 'a', when: 'foo': there"),
        ("name: f\nsteps:\n  a:\n    kind: x\n    dependsOn: [a]\n", "FILE:5:5: steps.a.dependsOn: the steps go round"),
        ("name: f\nsteps:\n  a:\n    kind: x\n    over: [1]\n", "FILE:5:5: steps.a.over: step 'a', over: only steps"),
        ("name: f\nsteps:\n  a:\n    kind: x\n    inputs: {b: !x y}\n", "FILE:5:5: steps.a.inputs: b: a TaggedScalar"),
        ("steps: {}\n", "FILE: name: Field required"),
        ("- a\n", "FILE:1:1: the file must hold a mapping"),
        ("name: {\n", "FILE:2:1: not valid YAML"),
    ],
)
def test_a_mistake_is_told_with_its_place(folder: CatalogueFolder, text: str, expected: str) -> None:
    """F2, F15: the file, the line, the column, and the way into the document."""
    file = folder.write("f.yaml", text)
    assert told(file).startswith(expected)


def test_a_file_can_be_too_much(folder: CatalogueFolder) -> None:
    """F15: one that is huge, or says one thing a billion times, is refused before it does harm."""
    assert "over 1000000 bytes" in told(folder.write("f.yaml", f"name: f\ndescription: {'x' * 1_000_000}\n"))
    rows = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    assert "more than 200,000 values" in told(folder.write("g.yaml", "name: f\nscope:\n  " + "\n  ".join(rows) + "\n"))
    assert "cannot read FILE" in told(folder.path / "nowhere.yaml")


def test_yaml_becomes_plain_json(folder: CatalogueFolder) -> None:
    """F15: dates are texts, numbers are numbers, and nothing of the parser is left in them."""
    file = folder.write(
        "f.yaml", "name: f\nscope: {d: 2026-01-02, n: 0x10, f: 1.50, b: true, s: 'x', l: [~, {k: v}]}\n"
    )
    scope = load_file(file).scope
    assert scope == {"d": "2026-01-02", "n": 16, "f": 1.5, "b": True, "s": "x", "l": [None, {"k": "v"}]}
    assert [type(value) for value in scope.values()] == [str, int, float, bool, str, list]


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
    assert {name: len(flow.steps) for name, flow in found.flows().items()} == {"built": 1, "given": 0}
    assert len(found.workers) == 1
    assert found.troubles() == {str(file): "there is a flow 'built' in a module already"}


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("import nowhere_at_all\n", BadConfig, "cannot import bad_flows: ModuleNotFoundError"),
        ("1 / 0\n", BadConfig, "cannot import bad_flows: ZeroDivisionError"),
        ("def (\n", BadConfig, "cannot import bad_flows: SyntaxError"),
        ("a, b = Flow('x'), Flow('x')\nb.step('a', 'http')\n", BadConfig, "there are two flows 'x'"),
        ("a = Flow('x')\na.step('a', 'http', after=['b'])\n", Invalid, "bad_flows: flow 'x': step 'a' depends on 'b'"),
    ],
)
def test_a_module_that_is_wrong_is_told(modules: Path, text: str, error: type[Invalid], said: str) -> None:
    """F15: at start, whatever it does when it is imported."""
    (modules / "bad_flows.py").write_text(f"from penstock.flows.definition.python_dsl import Flow\n{text}")
    with pytest.raises(error) as caught:
        load_module("bad_flows")
    assert said in caught.value.message


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
    found = Catalogue(section)
    with pytest.raises(BadConfig) as caught:
        found.make_workers(KindContext(section))
    assert caught.value.code == "FLOW_MODULE"
    assert caught.value.message.startswith(f"bad_makers: {said}")
