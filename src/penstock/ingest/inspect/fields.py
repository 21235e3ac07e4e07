"""Columns of all tables that are the same field: by their header, or by what different headers stand for."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from penstock.ingest.inspect.vocabulary import DATED, ColumnHint, ColumnMeaning, meaning_of
from penstock.ingest.transform.gate import normalize_name

_LONGEST_SPELLING = 200


@dataclass
class InspectedField:
    """A field of the payload before it has a type: its spellings, and its column in each table that has one."""

    name: str
    hint: ColumnHint
    spellings: list[str] = field(default_factory=list)
    number: int | None = None  # of the column, where its name does not tell it from others
    columns: dict[int, int] = field(default_factory=dict)

    @property
    def places(self) -> list[str | int]:
        return [self.number] if self.number is not None else list(self.spellings)

    @property
    def order(self) -> float:
        """Where it stands among the others, on the whole."""
        return sum(self.columns.values()) / len(self.columns)


@dataclass
class _Heading:
    """A header as it is compared, with where it is."""

    text: str
    meaning: ColumnMeaning
    columns: dict[int, int]


def fields_of(tables: list[list[str]], *, has_numbers: bool = True) -> tuple[list[InspectedField], list[str]]:
    """The fields behind the column names of *tables*, in the order of their columns; and what is doubtful."""
    headings, places = _headings(tables)
    doubled, warnings = _by_number(places, has_numbers=has_numbers)
    fields: dict[str, InspectedField] = {}
    lone, crowded = _lone_rests(headings), _crowded(headings)
    for heading in sorted(headings, key=lambda one: (one.meaning.rank, bool(one.meaning.rest), -len(one.columns))):
        meaning = heading.meaning
        rest = "" if meaning.name in lone else meaning.rest
        rest = meaning.all_rest if (meaning.name, meaning.rest) in crowded else rest
        _place(heading, f"{meaning.name}_{rest}" if rest else meaning.name, fields)
    for heading, number in doubled:
        taken = _free(heading.meaning.name, fields)
        fields[taken] = InspectedField(taken, heading.meaning.hint, [heading.text], number, heading.columns)
    ordered = sorted(fields.values(), key=lambda one: one.order)
    return ordered, [*warnings, *_dated(ordered, is_alone=len(tables) == 1 and has_numbers)]


def numbered_fields(width: int) -> list[InspectedField]:
    """Fields of a table without a header."""
    return [InspectedField(f"column_{n}", ColumnHint.NONE, [], n, {0: n - 1}) for n in range(1, width + 1)]


def _headings(tables: list[list[str]]) -> tuple[list[_Heading], list[_Heading]]:
    """The headers of all tables; and those that come more than once in one of them, once for each time."""
    found: dict[str, _Heading] = {}
    places: dict[tuple[str, int], _Heading] = {}
    repeated = {
        name for names in tables for name, count in Counter(map(normalize_name, names)).items() if name and count > 1
    }
    for table, names in enumerate(tables):
        seen: Counter[str] = Counter()
        for column, text in enumerate(names):
            name = normalize_name(text)
            if not name or len(text) > _LONGEST_SPELLING:
                continue
            known: _Heading = (
                places.setdefault((name, seen[name]), _Heading(text, meaning_of(text), {}))
                if name in repeated
                else found.setdefault(name, _Heading(text, meaning_of(text), {}))
            )
            known.columns[table] = column
            seen[name] += 1
    return list(found.values()), list(places.values())


def _by_number(places: list[_Heading], *, has_numbers: bool) -> tuple[list[tuple[_Heading, int]], list[str]]:
    """Columns of the same name are told apart by their numbers, if these are the same everywhere."""
    told: list[tuple[_Heading, int]] = []
    warnings: list[str] = []
    for heading in places:
        numbers = set(heading.columns.values())
        if len(numbers) == 1 and has_numbers:
            number = numbers.pop() + 1
            told.append((heading, number))
            warnings.append(f"there is more than one column {heading.text!r}: one is known by its number, {number}")
        else:
            warnings.append(f"there is more than one column {heading.text!r}, not always in the same place: left out")
    return told, warnings


def _lone_rests(headings: list[_Heading]) -> set[str]:
    """Usual names that only come with one addition: it tells nothing apart, and is not needed.

    Beside other prices, what is said of a price always tells it apart.
    """
    rests: dict[str, set[str]] = defaultdict(set)
    for heading in headings:
        rests[heading.meaning.name].add(heading.meaning.rest)
    prices = {heading.meaning.name for heading in headings if heading.meaning.hint is ColumnHint.MONEY}
    kept_apart = prices if len(prices) > 1 else set()
    return {name for name, found in rests.items() if len(found) == 1} - kept_apart


def _crowded(headings: list[_Heading]) -> set[tuple[str, str]]:
    """What headers of one table share when units and currencies are left out: then these tell them apart."""
    seen: dict[tuple[str, str], set[int]] = defaultdict(set)
    crowded: set[tuple[str, str]] = set()
    for heading in headings:
        place = (heading.meaning.name, heading.meaning.rest)
        if seen[place] & heading.columns.keys():
            crowded.add(place)
        seen[place] |= heading.columns.keys()
    return crowded


def _dated(fields: list[InspectedField], *, is_alone: bool) -> list[str]:
    """A header with a date in it is another one tomorrow."""
    told: list[str] = []
    for one in fields:
        dated = [text for text in one.spellings if DATED.search(text)]
        if not dated or one.number is not None:
            continue
        told.append(f"the header {dated[0]!r} has a date in it and will change")
        if is_alone and (column := one.columns.get(0)) is not None:
            one.number = column + 1
            told[-1] += f": it is known by its number, {one.number}"
    return told


def _place(heading: _Heading, usual: str, fields: dict[str, InspectedField]) -> None:
    meaning = heading.meaning
    for name in (usual, meaning.other):
        known = fields.get(name)
        if known is None:
            fields[name] = InspectedField(name, meaning.hint, [heading.text], None, dict(heading.columns))
            return
        if known.hint is meaning.hint and not known.columns.keys() & heading.columns.keys() and name == usual:
            known.spellings.append(heading.text)
            known.columns.update(heading.columns)
            return
    name = _free(usual, fields)
    fields[name] = InspectedField(name, meaning.hint, [heading.text], None, dict(heading.columns))


def _free(name: str, fields: dict[str, InspectedField]) -> str:
    number, free = 1, name
    while free in fields:
        number += 1
        free = f"{name}_{number}"
    return free
