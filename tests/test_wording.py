"""The check of names and words finds what it claims to find."""

import importlib.util
import subprocess
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "wording"


@pytest.fixture
def wording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, for a repository in *tmp_path*."""
    loader = SourceFileLoader("wording", str(SCRIPT))
    spec = importlib.util.spec_from_loader("wording", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "src").mkdir()
    return module


def check(wording: ModuleType, capsys: pytest.CaptureFixture[str], **files: str) -> list[str]:
    """Return the violations in *files*, whose names have `__` for `/` and `_dot_` for `.`."""
    for name, text in files.items():
        file = wording.ROOT / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    subprocess.run(["git", "add", "."], cwd=wording.ROOT, check=True)
    status = wording.main([])
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert status == (1 if lines else 0)
    return lines


def test_plain_text_passes(wording: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard words, words that contain a listed word, and the word in another role are accepted."""
    text = '"""Return the standard item, one of many."""\nmentality = "amendment, shareholder, overshadowed"\n'
    assert check(wording, capsys, src__plain_dot_py=text, docs__page_dot_md="# One page\n\nPaging and mapping.\n") == []


@pytest.mark.parametrize("text", ["class Step: ...\n", "if True:\n    class Step: ...\n"])
def test_a_duplicate_class_name_is_found(wording: ModuleType, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Both places of a class name that is used twice are listed."""
    found = check(wording, capsys, src__a_dot_py="class Step: ...\n", src__b_dot_py=text)
    assert len(found) == 1
    assert found[0].startswith("src/a.py:1, src/b.py:")
    assert found[0].endswith(": class Step is not unique")


def test_a_gerund_is_found(wording: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """A module is a noun; nouns that end like a gerund are listed in the script."""
    found = check(wording, capsys, src__waiting_dot_py="", src__rest_paging_dot_py="")
    assert found == ["src/waiting.py: a module is a noun, not a gerund"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('raise Invalid("X", "nobody claims it")\n', "nobody"),
        ('"""Whoever waits is woken."""\n', "whoever"),
        ("# Begun elsewhere.\n", "begun"),
        ("is_told = True\n", "told"),
        ("class MessageTeller: ...\n", "teller"),
        ("for one in many: ...\n", "one"),
        ('x = "work under\\\n way"\n', None),
        ('x = "runs that are under way"\n', "under way"),
    ],
)
def test_a_listed_word_is_found(
    wording: ModuleType, capsys: pytest.CaptureFixture[str], text: str, word: str | None
) -> None:
    """In identifiers, strings, docstrings and comments, with its line and the term to use instead."""
    found = check(wording, capsys, src__a_dot_py=text)
    assert [line.split(": use ")[0] for line in found] == ([f"src/a.py:1: {word!r}"] if word else [])


@pytest.mark.parametrize(
    "text", ['"""What is late."""\n', 'class A:\n    """Whose turn it is."""\n', 'def f():\n    "It runs."\n']
)
def test_a_docstring_without_a_subject_is_found(
    wording: ModuleType, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """A docstring of src/ starts with a verb or a noun; tests state what is so."""
    found = check(wording, capsys, src__a_dot_py=text, tests__test_a_dot_py=text)
    assert len(found) == 1
    assert found[0].startswith("src/a.py:1: the docstring starts with ")


@pytest.mark.parametrize("name", ["docs__page_dot_md", "deploy__values_dot_yaml", "src__queries_dot_sql", "Makefile"])
def test_documents_are_read(wording: ModuleType, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Documents, YAML, SQL and files without a suffix are checked too."""
    found = check(wording, capsys, **{name: "# Mend it.\n"})
    assert [line.split(": use ")[0].rsplit(":", 1)[1] for line in found] == [" 'mend'"]


def test_concepts_and_decisions_are_not_read(wording: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Essays keep their voice, and decisions are history."""
    text = "Nobody told whoever stood under way.\n"
    assert check(wording, capsys, docs__concepts_dot_md=text, docs__decisions__0001_dot_md=text) == []
