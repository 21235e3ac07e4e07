"""Names for columns that have none, by what they hold."""

from dataclasses import replace

from penstock.ingest.inspect.columns import Typed
from penstock.ingest.inspect.types import Guess
from penstock.ingest.inspect.vocabulary import Hint

_BARCODE = r"^[0-9]{8,14}$"
_CODE = r"^[A-Za-zА-Яа-я0-9][A-Za-zА-Яа-я0-9./_-]*$"
_LONG = 10


def named_by_content(columns: list[Typed]) -> tuple[list[Typed], list[str]]:
    """The same columns: codes, texts, prices and dates called so, each name given once."""
    taken: set[str] = set()
    found: list[Typed] = []
    for one in columns:
        name, hint = _name(one, taken)
        taken.add(name)
        found.append(replace(one, name=name, field=replace(one.field, hint=hint)))
    found, told = _priced(found, taken)
    guessed = [f"{one.name} ({one.field.number})" for one in found if not one.name.startswith("column_")]
    return found, [*told, *([f"names are guesses by what the columns hold: {', '.join(guessed)}"] if guessed else [])]


def _name(one: Typed, taken: set[str]) -> tuple[str, Hint]:
    choices = {
        "barcode": (one.guess.type == "string" and _share(one, _BARCODE) > 0.9, Hint.CODE),
        "sku": (one.guess.type == "string" and _is_code(one), Hint.CODE),
        "price_minor": (one.guess.type == "money", Hint.MONEY),
        "date": (one.guess.type in ("date", "datetime"), Hint.MOMENT),
        "name": (one.guess.type == "string" and _length(one) > _LONG, Hint.TEXT),
    }
    for name, (holds, hint) in choices.items():
        if holds and name not in taken:
            return name, hint
    return f"{one.field.name}_minor" if one.guess.type == "money" else one.field.name, one.field.hint


def _priced(columns: list[Typed], taken: set[str]) -> tuple[list[Typed], list[str]]:
    """The only column with a point and two digits is most likely a price."""
    decimals = [one for one in columns if one.guess.type == "decimal" and one.options.get("scale") == 2]
    if len(decimals) != 1 or "price_minor" in taken:
        return columns, []
    options = {key: value for key, value in decimals[0].options.items() if key != "scale"} | {"type": "money"}
    price = replace(decimals[0], name="price_minor", guess=Guess(options, decimals[0].guess.doubts))
    told = f"column {price.field.number} is taken for a price: its numbers have two digits behind the point"
    return [price if one is decimals[0] else one for one in columns], [told]


def _is_code(one: Typed) -> bool:
    filled = one.texts.filter(~one.is_empty)
    return len(filled) > 1 and filled.n_unique() >= len(filled) * 0.98 and _share(one, _CODE) > 0.95


def _share(one: Typed, pattern: str) -> float:
    filled = one.texts.filter(~one.is_empty)
    return int(filled.str.contains(pattern).sum()) / len(filled) if len(filled) else 0.0


def _length(one: Typed) -> float:
    lengths = one.texts.filter(~one.is_empty).str.len_chars()
    return int(lengths.sum()) / len(lengths) if len(lengths) else 0.0
