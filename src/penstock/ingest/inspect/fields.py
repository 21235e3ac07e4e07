"""The fields behind the columns of all tables: columns with the same header, or with headers of the same meaning."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from penstock.ingest.inspect.vocabulary import DATED, ColumnHint, ColumnMeaning, find_meaning
from penstock.ingest.transform.gate import normalize_name

_LONGEST_SPELLING = 200


@dataclass
class InspectedField:
    """A field of the payload before it has a type: its spellings, and its column in each table that has one."""

    name: str
    hint: ColumnHint
    spellings: list[str] = field(default_factory=list)
    number: int | None = None  # of the column, if its name does not identify it
    columns: dict[int, int] = field(default_factory=dict)

    @property
    def references(self) -> list[str | int]:
        return [self.number] if self.number is not None else list(self.spellings)

    @property
    def order(self) -> float:
        """The average position of the column among the others."""
        return sum(self.columns.values()) / len(self.columns)


@dataclass
class _Heading:
    """A header with its meaning, and its column in each table."""

    text: str
    meaning: ColumnMeaning
    columns: dict[int, int]


def build_fields(tables: list[list[str]], *, has_numbers: bool = True) -> tuple[list[InspectedField], list[str]]:
    """Return the fields behind the column names of *tables*, in the order of their columns, and the warnings."""
    headings, repeated = _collect_headings(tables)
    numbered, warnings = _number_repeated(repeated, has_numbers=has_numbers)
    fields: dict[str, InspectedField] = {}
    lone, crowded = _find_lone_rests(headings), _find_crowded(headings)
    for heading in sorted(headings, key=_rank_heading):
        meaning = heading.meaning
        rest = "" if meaning.name in lone else meaning.rest
        rest = meaning.all_rest if (meaning.name, meaning.rest) in crowded else rest
        _add_heading(heading, f"{meaning.name}_{rest}" if rest else meaning.name, fields)
    for heading, number in numbered:
        taken = _find_free_name(heading.meaning.name, fields)
        fields[taken] = InspectedField(taken, heading.meaning.hint, [heading.text], number, heading.columns)
    ordered = sorted(fields.values(), key=lambda field: field.order)
    return ordered, [*warnings, *_report_dated(ordered, is_alone=len(tables) == 1 and has_numbers)]


def build_numbered_fields(width: int) -> list[InspectedField]:
    """Return the fields of a table without a header."""
    return [InspectedField(f"column_{n}", ColumnHint.NONE, [], n, {0: n - 1}) for n in range(1, width + 1)]


def _collect_headings(tables: list[list[str]]) -> tuple[list[_Heading], list[_Heading]]:
    """Return the headings of all tables; and the headings that a table repeats, once for each occurrence."""
    unique: dict[str, _Heading] = {}
    repeated: dict[tuple[str, int], _Heading] = {}
    repeated_names = {
        name for names in tables for name, count in Counter(map(normalize_name, names)).items() if name and count > 1
    }
    for table, names in enumerate(tables):
        seen: Counter[str] = Counter()
        for column, text in enumerate(names):
            name = normalize_name(text)
            if not name or len(text) > _LONGEST_SPELLING:
                continue
            heading: _Heading = (
                repeated.setdefault((name, seen[name]), _Heading(text, find_meaning(text), {}))
                if name in repeated_names
                else unique.setdefault(name, _Heading(text, find_meaning(text), {}))
            )
            heading.columns[table] = column
            seen[name] += 1
    return list(unique.values()), list(repeated.values())


def _number_repeated(repeated: list[_Heading], *, has_numbers: bool) -> tuple[list[tuple[_Heading, int]], list[str]]:
    """Identify repeated headings by the number of their column, if it is the same in all tables."""
    numbered: list[tuple[_Heading, int]] = []
    warnings: list[str] = []
    for heading in repeated:
        numbers = set(heading.columns.values())
        if len(numbers) == 1 and has_numbers:
            number = numbers.pop() + 1
            numbered.append((heading, number))
            warnings.append(f"several columns have the header {heading.text!r}: column {number} is read by its number")
        else:
            problem = f"several columns have the header {heading.text!r}, at different positions in the tables"
            warnings.append(f"{problem}: they are not read")
    return numbered, warnings


def _rank_heading(heading: _Heading) -> tuple[int, bool, int]:
    return heading.meaning.rank, bool(heading.meaning.rest), -len(heading.columns)


def _find_lone_rests(headings: list[_Heading]) -> set[str]:
    """Return the names whose headings all have the same addition, which is therefore not needed in the field name.

    The additions of prices are always needed if there are several kinds of prices.
    """
    rests: dict[str, set[str]] = defaultdict(set)
    for heading in headings:
        rests[heading.meaning.name].add(heading.meaning.rest)
    prices = {heading.meaning.name for heading in headings if heading.meaning.hint is ColumnHint.MONEY}
    needed = prices if len(prices) > 1 else set()
    return {name for name, additions in rests.items() if len(additions) == 1} - needed


def _find_crowded(headings: list[_Heading]) -> set[tuple[str, str]]:
    """Return the names that several headings of a table share without units and currencies, which are then needed."""
    seen: dict[tuple[str, str], set[int]] = defaultdict(set)
    crowded: set[tuple[str, str]] = set()
    for heading in headings:
        name = (heading.meaning.name, heading.meaning.rest)
        if seen[name] & heading.columns.keys():
            crowded.add(name)
        seen[name] |= heading.columns.keys()
    return crowded


def _report_dated(fields: list[InspectedField], *, is_alone: bool) -> list[str]:
    """Return a warning for each header that contains a date, and so changes with every file."""
    warnings: list[str] = []
    for dated_field in fields:
        dated = [text for text in dated_field.spellings if DATED.search(text)]
        if not dated or dated_field.number is not None:
            continue
        warnings.append(f"the header {dated[0]!r} contains a date and will change")
        if is_alone and (column := dated_field.columns.get(0)) is not None:
            dated_field.number = column + 1
            warnings[-1] += f": column {dated_field.number} is read by its number"
    return warnings


def _add_heading(heading: _Heading, usual: str, fields: dict[str, InspectedField]) -> None:
    meaning = heading.meaning
    for name in (usual, meaning.other):
        field = fields.get(name)
        if field is None:
            fields[name] = InspectedField(name, meaning.hint, [heading.text], None, dict(heading.columns))
            return
        if field.hint is meaning.hint and not field.columns.keys() & heading.columns.keys() and name == usual:
            field.spellings.append(heading.text)
            field.columns.update(heading.columns)
            return
    name = _find_free_name(usual, fields)
    fields[name] = InspectedField(name, meaning.hint, [heading.text], None, dict(heading.columns))


def _find_free_name(name: str, fields: dict[str, InspectedField]) -> str:
    number, free = 1, name
    while free in fields:
        number += 1
        free = f"{name}_{number}"
    return free
