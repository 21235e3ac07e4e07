"""docs/architecture.md, CONTRIBUTING.md and the decisions name files, folders and symbols of the source that exist."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import penstock
from penstock.settings import Settings
from tests.pages import ROOT, outside_blocks

pytestmark = pytest.mark.docs

SOURCE = Path(penstock.__file__).parent
ARCHITECTURE = ROOT / "docs" / "architecture.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DECISIONS = ROOT / "docs" / "decisions"
PARTS = ("tracking", "refdata", "ingest", "flows", "harvest")
WALKS = ("Tracking", "Refdata", "Ingest", "Flows", "Harvest")
MOST_STATIONS, MOST_FILES = 15, 12
_PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)*/?)`")
_WALK = re.compile(r"^## (\w+): [^\n]+\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_STATION = re.compile(r"^(\d+)\. `([^`]+)` `([^`]+)`: [A-Z`]", re.MULTILINE)
_NUMBERED = re.compile(r"^\d+\. ", re.MULTILINE)
_FILES = re.compile(r"^Files to open: (\d+)\.$", re.MULTILINE)
_TREE = re.compile(r"^```\nsrc/penstock/\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_ENTRY = re.compile(r"^((?:  )+)([\w.]+/?)(?:  +\S.*)$")
_BARE = re.compile(r"`(\w+\.(?:py|sql))`")
_DOTTED = re.compile(rf"`((?:{'|'.join((*PARTS, 'kernel'))})\.\w+)(?:\.[\w.]+)?`")
_PLACEHOLDERS = ("NAME", "NNNN")


class Station(NamedTuple):
    """One numbered line of a walk."""

    number: int
    file: str
    symbol: str


def walks() -> dict[str, str]:
    """Return the text of each walk by the name of its part."""
    return dict(_WALK.findall(ARCHITECTURE.read_text()))


def stations(walk: str) -> list[Station]:
    return [Station(int(number), file, symbol) for number, file, symbol in _STATION.findall(walk)]


def paths_in(text: str) -> Iterator[str]:
    """Return what looks like a path of the repository: it has a slash, and a known suffix or a known first folder."""
    first = {reference.name for reference in (*ROOT.iterdir(), *SOURCE.iterdir()) if reference.is_dir()}
    for path in _PATH.findall(outside_blocks(text)):
        is_source = Path(path).suffix in (".py", ".sql", ".yaml", ".md") or path.partition("/")[0] in first
        if "/" in path and is_source and not any(word in path for word in _PLACEHOLDERS):
            yield path


def in_decisions(find: Callable[[str], Iterable[str]]) -> set[tuple[str, str]]:
    """Return the pages of the decisions, each with one name that *find* finds on it outside of the examples."""
    pages = DECISIONS.rglob("*.md")
    return {(page.name, name) for page in pages for name in find(outside_blocks(page.read_text()))}


def is_known_without_folder(name: str) -> bool:
    """Return whether several parts have a module *name*, or an SQL file *name* exists."""
    if name.endswith(".sql"):
        return any(SOURCE.rglob(name))
    return sum((SOURCE / part / name).exists() for part in PARTS) > 1


def is_module_or_setting(dotted: str) -> bool:
    """Return whether *dotted* is a module, a folder or a setting of its first word, a part or the kernel."""
    part, _, name = dotted.partition(".")
    section = getattr(Settings(), part, None)
    settings = {field.alias or key for key, field in type(section).model_fields.items()} if section else set[str]()
    return name in settings or any((SOURCE / part / file).exists() for file in (name, f"{name}.py"))


def tree() -> list[str]:
    """Return the paths that the tree of CONTRIBUTING.md lists, folders with a slash at the end."""
    (block,) = _TREE.findall(CONTRIBUTING.read_text())
    above: list[str] = []
    found = []
    for line in block.splitlines():
        entry = _ENTRY.match(line)
        assert entry, f"not an entry with a description: {line!r}"
        depth = len(entry[1]) // 2 - 1
        above = [*above[:depth], entry[2]]
        found.append("".join(above))
    return found


def symbols_of(file: Path) -> set[str]:
    """Return the functions, classes, methods and values of a module, or the named statements of an SQL file."""
    text = file.read_text()
    if file.suffix == ".sql":
        return set(re.findall(r"^-- name: (\w+)$", text, re.MULTILINE))
    return {name for node in ast.parse(text).body for name in _defined(node)}


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    if isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    if isinstance(node, ast.ClassDef):
        yield from (f"{node.name}.{name}" for inner in node.body for name in _defined(inner))


@pytest.mark.parametrize("page", [ARCHITECTURE, CONTRIBUTING], ids=lambda page: page.name)
def test_every_path_exists(page: Path) -> None:
    """Every path that a page names is a file or a folder of the repository or of src/penstock."""
    paths = set(paths_in(page.read_text()))
    assert len(paths) > 20
    assert sorted(path for path in paths if not any((base / path).exists() for base in (ROOT, SOURCE))) == []


def test_no_decision_names_a_path_that_is_gone() -> None:
    """Every path of a module or an SQL file that a decision names exists."""
    named = {path for path in in_decisions(paths_in) if path[1].endswith((".py", ".sql"))}
    assert len(named) > 5
    assert sorted(path for path in named if not any((base / path[1]).exists() for base in (ROOT, SOURCE))) == []


def test_a_decision_names_the_folder_of_a_module() -> None:
    """A module that a decision names without its folder is one that several parts have."""
    named = in_decisions(_BARE.findall)
    assert len(named) > 3
    assert sorted(reference for reference in named if not is_known_without_folder(reference[1])) == []


def test_no_decision_names_a_dotted_module_that_is_gone() -> None:
    """Every dotted name in a decision that starts with a part or the kernel is a module, a folder or a setting."""
    named = in_decisions(_DOTTED.findall)
    assert named
    assert sorted(reference for reference in named if not is_module_or_setting(reference[1])) == []


def test_the_table_of_changes_names_symbols_that_exist() -> None:
    """Each of the 14 changes in CONTRIBUTING.md names its files, and symbols that one of these files defines."""
    (section,) = re.findall(
        r"^## Where does my change go\n(.*?)^## ", CONTRIBUTING.read_text(), re.DOTALL | re.MULTILINE
    )
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)[1:]
    assert len(rows) == 14
    for change, places, symbols in rows:
        files = [SOURCE / path for path in paths_in(places) if path.endswith(".py")]
        assert files, change
        known = set[str]().union(*map(symbols_of, files))
        named = re.findall(r"`([^`]+)`", symbols)
        assert named, change
        assert [symbol for symbol in named if symbol not in known] == [], change


def test_every_part_has_a_walk() -> None:
    """docs/architecture.md has one walk for each of the five parts, in their order."""
    assert tuple(walks()) == WALKS


@pytest.mark.parametrize("part", WALKS)
def test_every_station_exists(part: str) -> None:
    """Every station names a file below src/penstock and a symbol that this file defines."""
    walk = walks()[part]
    found = stations(walk)
    assert [reference.number for reference in found] == list(range(1, len(_NUMBERED.findall(walk)) + 1))
    missing = [reference for reference in found if not (SOURCE / reference.file).is_file()]
    assert missing == []
    assert [reference for reference in found if reference.symbol not in symbols_of(SOURCE / reference.file)] == []


@pytest.mark.parametrize("part", WALKS)
def test_a_walk_is_short(part: str) -> None:
    """A walk has at most 15 stations in at most 12 files, has a diagram, and states its number of files."""
    walk = walks()[part]
    found = stations(walk)
    files = {reference.file for reference in found}
    assert 0 < len(found) <= MOST_STATIONS
    assert len(files) <= MOST_FILES
    assert [int(number) for number in _FILES.findall(walk)] == [len(files)]
    assert walk.count("\n```\n") == 2


def test_the_tree_lists_every_folder() -> None:
    """The tree of CONTRIBUTING.md lists every folder of src/penstock, and nothing that does not exist."""
    listed = tree()
    folders = {
        f"{file.parent.relative_to(SOURCE)}/"
        for file in SOURCE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.parent != SOURCE
    }
    parents = {f"{above}/" for folder in folders for above in Path(folder).parents if above != Path()}
    assert sorted((folders | parents) - set(listed)) == []
    assert [path for path in listed if not (SOURCE / path).exists()] == []
    assert len(listed) == len(set(listed))
