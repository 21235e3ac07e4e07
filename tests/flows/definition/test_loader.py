"""Loading of flow files and modules, and the errors of invalid ones."""

from pathlib import Path

import pytest

from penstock.flows.definition.loader import load_file, load_module
from penstock.kernel.errors import BadConfig, Invalid
from tests.flows.definition.catalogue_folder import CatalogueFolder


def load_error(path: Path) -> str:
    """Load an invalid file, and return the error with FILE for its path."""
    with pytest.raises(BadConfig) as caught:
        load_file(path)
    return caught.value.message.replace(str(path), "FILE")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: a\nname: b\n", 'FILE:2:1: not valid YAML: found duplicate key "name"'),
        ("name: f\nsteps:\n  a: {kind: x}\n  a: {kind: y}\n", 'FILE:4:3: not valid YAML: found duplicate key "a"'),
        ("name: f\nsteps:\n- {id: a, kind: x}\n- {id: a, kind: x}\n", "FILE:2:1: steps: two steps have the id 'a'"),
        ("name: f\nsteps:\n  a: {kind: x, dependOn: []}\n", "FILE:3:16: steps.a.dependOn: unknown key; did you mean"),
        (
            "name: f\nsteps:\n  a:\n    kind: x\n    when: foo\n",
            "FILE:5:5: steps.a.when: step 'a', when: invalid expression 'foo': unknown name",
        ),
        (
            "name: f\nsteps:\n  a:\n    kind: x\n    dependsOn: [a]\n",
            "FILE:5:5: steps.a.dependsOn: the dependencies form a cycle",
        ),
        ("name: f\nsteps:\n  a:\n    kind: x\n    over: [1]\n", "FILE:5:5: steps.a.over: step 'a', over: only allowed"),
        (
            "name: f\nsteps:\n  a:\n    kind: x\n    inputs: {b: !x y}\n",
            "FILE:5:5: steps.a.inputs: b: TaggedScalar cannot",
        ),
        ("steps: {}\n", "FILE: name: is required"),
        ("- a\n", "FILE:1:1: the file must contain keys with values"),
        ("name: {\n", "FILE:2:1: not valid YAML"),
    ],
)
def test_error_has_its_location(folder: CatalogueFolder, text: str, expected: str) -> None:
    """F2, F15: an error has the file, the line, the column and the key."""
    file = folder.write("f.yaml", text)
    assert load_error(file).startswith(expected)


def test_size_of_a_file_is_limited(folder: CatalogueFolder) -> None:
    """F15: a file that is large, or expands to many values with anchors, is refused."""
    assert "has more than 1000000 bytes" in load_error(
        folder.write("f.yaml", f"name: f\ndescription: {'x' * 1_000_000}\n")
    )
    rows = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    assert "more than 200,000 values" in load_error(
        folder.write("g.yaml", "name: f\nscope:\n  " + "\n  ".join(rows) + "\n")
    )
    assert "cannot read FILE" in load_error(folder.path / "nowhere.yaml")


def test_yaml_becomes_plain_json(folder: CatalogueFolder) -> None:
    """F15: dates become texts, numbers stay numbers, and no types of the parser remain."""
    file = folder.write(
        "f.yaml", "name: f\nscope: {d: 2026-01-02, n: 0x10, f: 1.50, b: true, s: 'x', l: [~, {k: v}]}\n"
    )
    scope = load_file(file).scope
    assert scope == {"d": "2026-01-02", "n": 16, "f": 1.5, "b": True, "s": "x", "l": [None, {"k": "v"}]}
    assert [type(value) for value in scope.values()] == [str, int, float, bool, str, list]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("import nowhere_at_all\n", BadConfig, "cannot import bad_flows: ModuleNotFoundError"),
        ("1 / 0\n", BadConfig, "cannot import bad_flows: ZeroDivisionError"),
        ("def (\n", BadConfig, "cannot import bad_flows: SyntaxError"),
        ("a, b = Flow('x'), Flow('x')\nb.step('a', 'http')\n", BadConfig, "two flows have the name 'x'"),
        ("a = Flow('x')\na.step('a', 'http', after=['b'])\n", Invalid, "bad_flows: flow 'x': step 'a' depends on 'b'"),
    ],
)
def test_invalid_module(modules: Path, text: str, error: type[Invalid], message: str) -> None:
    """F15: loading reports every error that a module raises."""
    (modules / "bad_flows.py").write_text(f"from penstock.flows.definition.python_dsl import Flow\n{text}")
    with pytest.raises(error) as caught:
        load_module("bad_flows")
    assert message in caught.value.message
