"""What is read of a file or a module of flows, and how a mistake in it is told."""

from pathlib import Path

import pytest

from penstock.flows.definition.loader import load_file, load_module
from penstock.kernel.errors import BadConfig, Invalid
from tests.flows.definition.catalogue_folder import CatalogueFolder


def told(path: Path) -> str:
    """What is wrong with a file, with FILE for its path."""
    with pytest.raises(BadConfig) as caught:
        load_file(path)
    return caught.value.message.replace(str(path), "FILE")


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
        ("steps: {}\n", "FILE: name: is required"),
        ("- a\n", "FILE:1:1: the file must contain keys with values"),
        ("name: {\n", "FILE:2:1: not valid YAML"),
    ],
)
def test_a_mistake_is_told_with_its_place(folder: CatalogueFolder, text: str, expected: str) -> None:
    """F2, F15: the file, the line, the column, and the way into the document."""
    file = folder.write("f.yaml", text)
    assert told(file).startswith(expected)


def test_a_file_can_be_too_much(folder: CatalogueFolder) -> None:
    """F15: one that is huge, or says one thing a billion times, is refused before it does harm."""
    assert "has more than 1000000 bytes" in told(folder.write("f.yaml", f"name: f\ndescription: {'x' * 1_000_000}\n"))
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
