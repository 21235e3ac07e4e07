"""`penstock flow validate|graph` as a user types it: output, exit codes, and what to do next."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli.main import app, guarded
from tests.support.processes import Result

GOOD = "name: {name}\nsteps:\n  a: {{kind: load}}\n  b: {{kind: load, dependsOn: [a]}}\n"
RING = "name: ring\nsteps:\n  a: {kind: load, dependsOn: [b]}\n  b: {kind: load, dependsOn: [a]}\n"
PYTHON = """
from penstock.flows.definition.python_dsl import Flow
one = Flow("one")
first = one.step("first", "load")
one.step("last", "load", after=[first])
two = Flow("two")
"""
Typed = Callable[..., Result]


@pytest.fixture
def flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """The commands of `penstock flow`, typed in a folder with a good flow and a bad one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("good.yaml").write_text(GOOD.format(name="good"))
    Path("ring.yaml").write_text(RING)

    def typed(*args: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["penstock", "flow", *args])
        with pytest.raises(SystemExit) as ended:
            guarded(app)
        told = capsys.readouterr()
        assert "mistake in Penstock" not in told.err
        return Result(int(ended.value.code or 0), told.out, told.err)

    return typed


def test_good_flows_are_told_in_a_line_each(flow: Typed) -> None:
    """F15: the file, the flow, how many steps."""
    Path("empty.yml").write_text("name: empty\n")
    done = flow("validate", "good.yaml", "empty.yml")
    assert (done.code, done.out) == (0, "ok   good.yaml: good, 2 steps\nok   empty.yml: empty, 0 steps\n")


def test_one_bad_flow_is_enough(flow: Typed) -> None:
    """F15: it is told with its line, the others are looked at all the same, and the exit code is 2."""
    done = flow("validate", "ring.yaml", "good.yaml", "nowhere.yaml")
    ring, good, nowhere = done.out.splitlines()
    assert done.code == 2
    assert ring.startswith("bad  ring.yaml:3:19: steps.a.dependsOn: the steps go round in a ring: a → b → a")
    assert good == "ok   good.yaml: good, 2 steps"
    assert nowhere.startswith("bad  nowhere.yaml: cannot read nowhere.yaml: No such file")


def test_the_inputs_of_known_kinds_are_looked_at(flow: Typed) -> None:
    """F2, F15: as they are when a run is asked for."""
    Path("http.yaml").write_text("name: http\nsteps:\n  a:\n    kind: http\n    inputs: {uri: x}\n")
    done = flow("validate", "http.yaml")
    assert (done.code, "bad  http.yaml:5:5: steps.a.inputs: step 'a', inputs: " in done.out) == (2, True)


def test_a_folder_is_all_its_files(flow: Typed) -> None:
    """F15: each in its own line; an empty one is a mistake."""
    done = flow("validate", ".")
    assert [line[:15] for line in done.out.splitlines()] == ["ok   good.yaml:", "bad  ring.yaml:"]
    Path("none").mkdir()
    done = flow("validate", "none")
    assert (done.code, done.out.startswith("bad  none: there are no *.yaml in it")) == (2, True)


def test_files_that_lead_back_to_each_other_are_told(flow: Typed) -> None:
    """F14, F15: each is good by itself; the one that closes the circle is what a server would refuse."""
    inner = "name: {name}\nsteps:\n  s: {{kind: flow, inputs: {{flow: {flow}}}}}\n"
    Path("x.yaml").write_text(inner.format(name="x", flow="y"))
    Path("y.yaml").write_text(inner.format(name="y", flow="x"))
    assert flow("validate", "y.yaml").code == 0
    done = flow("validate", "x.yaml", "y.yaml")
    x, y = done.out.splitlines()
    assert (done.code, x) == (2, "ok   x.yaml: x, 1 step")
    assert y.startswith("bad  y.yaml: flow y would run within itself: y → x → y")


def test_programs_read_json(flow: Typed) -> None:
    """F15: with --json, what is wrong is data."""
    done = flow("validate", "--json", "good.yaml", "ring.yaml")
    good, ring = json.loads(done.out)
    assert done.code == 2
    assert good == {"file": "good.yaml", "valid": True, "flow": "good", "steps": 2}
    assert (ring["valid"], ring["error"]["code"]) == (False, "FLOW_INVALID")
    assert ring["error"]["problems"][0]["path"] == "steps.a.dependsOn"


def test_flows_in_python_are_looked_at_too(flow: Typed) -> None:
    """F15: as a file, and as a module that is found here."""
    Path("own_module_of_flows.py").write_text(PYTHON)
    line = "one, 2 steps; two, 0 steps\n"
    assert flow("validate", "own_module_of_flows.py").out == f"ok   own_module_of_flows.py: {line}"
    assert flow("validate", "own_module_of_flows").out == f"ok   own_module_of_flows: {line}"
    Path("broken.py").write_text("1 / 0")
    done = flow("validate", "broken.py", "no_such_module")
    assert done.code == 2
    assert "bad  broken.py: cannot import broken.py: ZeroDivisionError" in done.out
    assert "bad  no_such_module: cannot import no_such_module: ModuleNotFoundError" in done.out


def test_a_flow_is_drawn(flow: Typed) -> None:
    """F15: for people, for Mermaid, and as data."""
    drawn = flow("graph", "good.yaml")
    assert drawn.code == 0
    assert drawn.out.count("▼") == 1
    assert flow("graph", "good.yaml", "--mermaid").out.splitlines()[0] == "flowchart TD"
    told = json.loads(flow("graph", "good.yaml", "--json").out)
    assert (told["flow"], [step["id"] for step in told["steps"]]) == ("good", ["a", "b"])
    assert told["steps"][1]["dependsOn"] == ["a"]
    assert told["mermaid"].startswith("flowchart TD")


def test_one_of_several_is_drawn_by_its_name(flow: Typed) -> None:
    """F15: without one, or with one that is not there, it is told which there are."""
    Path("several.py").write_text(PYTHON)
    assert "last" in flow("graph", "several.py", "one").out
    done = flow("graph", "several.py")
    assert (done.code, "name one of: one, two" in done.err) == (2, True)
    done = flow("graph", "several.py", "three")
    assert (done.code, "there are: one, two" in done.err) == (5, True)
    assert flow("graph", ".", "good").code == 0, "a bad file beside it is not in the way"


def test_what_cannot_be_drawn_is_told(flow: Typed) -> None:
    """F15: by the exit code of its error."""
    done = flow("graph", "ring.yaml")
    assert (done.code, "go round in a ring" in done.err) == (3, True)
    assert flow("graph", "nowhere.yaml").code == 3
