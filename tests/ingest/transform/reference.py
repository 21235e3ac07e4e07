"""What ingest makes of a delimited file, said again in plain Python, a cell at a time: slow, and easy to believe."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from datetime import datetime
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any

from penstock.ingest.supplier import LARGEST, ColumnType, Supplier, SupplierColumn

Value = str | int | bool | None
# What Unicode calls White_Space; str.strip would take \x1c to \x1f as well.
_WHITE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_BLANKS = " \t\u00a0\u2009\u202f'’`"
_CURRENCIES = ["₽", "$", "€", "£", "¥", "₸", "рублей", "рубля", "рубль", "руб.", "руб", "р.", "р", "тг.", "тг"]
_CURRENCIES += ["rub", "usd", "eur", "kzt", "byn", "cny", "gbp"]
_MORE = ["более", "больше", "свыше", "от", "over", f"more[{_BLANKS}]*than", f"at[{_BLANKS}]*least"]
_UNREAD = {
    ColumnType.INTEGER: "NOT_INTEGER",
    ColumnType.MONEY: "NOT_MONEY",
    ColumnType.DECIMAL: "NOT_DECIMAL",
    ColumnType.DATE: "NOT_DATE",
    ColumnType.DATETIME: "NOT_DATE",
    ColumnType.ENUM: "NOT_IN_ENUM",
}


@dataclass
class Expected:
    """What shall be in the files of a run, and what its statistics shall say."""

    facts: list[dict[str, Any]] = field(default_factory=list)
    bad: list[dict[str, Any]] = field(default_factory=list)
    blank: int = 0
    skipped: int = 0


def expected(rows: list[list[str]], supplier: Supplier, run_id: str, name: str) -> Expected:
    """The facts and bad rows of *rows*, of which the first one is the header."""
    found = Expected()
    begin = {"run_id": run_id, "supplier": name}
    above: dict[str, str] = {}
    for number, row in enumerate(rows[1:], start=2):
        cells = {
            name: row[rows[0].index(str(column.source))] if rows[0].index(str(column.source)) < len(row) else ""
            for name, column in supplier.columns.items()
        }
        first = next((text for cell in row if (text := stripped(cell))), None)
        if first and any(re.search(pattern, first) for pattern in supplier.source.skip_rows):
            found.skipped += 1
            continue
        is_torn = any(stripped(cell) for cell in row[len(rows[0]) :])
        if not is_torn and not any(stripped(cell) for cell in cells.values()):
            found.blank += 1
            continue
        for name in [name for name, column in supplier.columns.items() if column.fill_down]:
            cells[name] = above[name] = stripped(cells[name]) or above.get(name, "")
        payload, told = _judged(cells, supplier)
        told = {"reason_code": "ROW_TOO_LONG", "column": None, "raw_value": None} if is_torn else told
        if told:
            kept = {name: told[name] for name in told if supplier.keep_raw or name != "raw_value"}
            found.bad.append({**begin, "row_number": number, **kept})
        else:
            row_id = hashlib.sha256(canonical(payload)).hexdigest()
            found.facts.append({**begin, "row_id": row_id, "row_number": number, "payload": payload})
    _settle(found, supplier, begin)
    return found


def ndjson(lines: list[dict[str, Any]]) -> bytes:
    texts = []
    for line in lines:
        known = {key: value for key, value in line.items() if key != "payload"}
        text = json.dumps(known, ensure_ascii=False, separators=(",", ":")).encode()
        payload = b',"payload":' + canonical(line["payload"]) + b"}" if "payload" in line else b"}"
        texts.append(text[:-1] + payload + b"\n")
    return b"".join(texts)


def canonical(payload: dict[str, Value]) -> bytes:
    """As RFC 8785 has it: names sorted by UTF-16 code units."""
    names = sorted(payload, key=lambda name: name.encode("utf-16-be"))
    ordered = {name: payload[name] for name in names}
    return json.dumps(ordered, ensure_ascii=False, separators=(",", ":")).encode()


def stripped(text: str) -> str:
    return text.strip(_WHITE)


def _settle(found: Expected, supplier: Supplier, begin: dict[str, str]) -> None:
    if not supplier.key or supplier.duplicate_keys == "keep":
        return
    kept: dict[tuple[Value, ...], dict[str, Any]] = {}
    for fact in found.facts if supplier.duplicate_keys == "first" else reversed(found.facts):
        kept.setdefault(tuple(fact["payload"][name] for name in supplier.key), fact)
    numbers = {fact["row_number"] for fact in kept.values()}
    gone = [fact["row_number"] for fact in found.facts if fact["row_number"] not in numbers]
    found.facts = [fact for fact in found.facts if fact["row_number"] in numbers]
    bad = {"reason_code": "KEY_DUPLICATE", "column": ", ".join(supplier.key)}
    found.bad += [{**begin, "row_number": number, **bad} for number in gone]


def _judged(cells: dict[str, str], supplier: Supplier) -> tuple[dict[str, Value], dict[str, Any] | None]:
    payload: dict[str, Value] = {}
    told = None
    for name, column in supplier.columns.items():
        payload[name], reason = value_of(column, cells[name], is_required=column.required or name in supplier.key)
        if reason and not told:
            told = {"reason_code": reason, "column": name, "raw_value": cells[name][:200]}
    return payload, told


def value_of(column: SupplierColumn, raw: str, *, is_required: bool) -> tuple[Value, str | None]:
    """What a cell becomes, and what is wrong with it."""
    for pattern, by in column.replace.items():
        raw = re.sub(pattern, by, raw)
    text = stripped(raw)
    if text in ("", *column.empty):
        return column.default, "REQUIRED_MISSING" if is_required and column.default is None else None
    if column.extract:
        match = re.search(column.extract, text)
        if not match:
            return None, "PATTERN_MISMATCH"
        text = stripped(match.group(1 if match.re.groups else 0))
    if column.case:
        text = text.upper() if column.case == "upper" else text.lower()
    value = _read(column, text)
    return value, _UNREAD[column.type] if value is None else _refused(column, text, value)


def _refused(column: SupplierColumn, text: str, value: Value) -> str | None:
    if column.type in (ColumnType.INTEGER, ColumnType.MONEY) and abs(int(value or 0)) > LARGEST:
        return "OUT_OF_RANGE"
    if column.min is not None and Decimal(str(value)) < column.min:
        return "OUT_OF_RANGE"
    if column.max is not None and Decimal(str(value)) > column.max:
        return "OUT_OF_RANGE"
    if column.pattern and not re.fullmatch(column.pattern, text):
        return "PATTERN_MISMATCH"
    if column.max_length is not None and len(text) > column.max_length:
        return "TOO_LONG"
    return None


def _read(column: SupplierColumn, text: str) -> Value:
    if column.type is ColumnType.STRING:
        return text
    if column.type is ColumnType.ENUM:
        values = column.values if isinstance(column.values, dict) else {one: one for one in column.values or []}
        return {key.strip().lower(): value for key, value in values.items()}.get(text.lower())
    if column.type is ColumnType.DATE:
        return _date(column, text)
    if column.type is ColumnType.DATETIME:
        return _datetime(column, text)
    scale = 0 if column.type is ColumnType.INTEGER else column.scale
    number = _number(column, text)
    scaled = None if number is None else _scaled(number, scale, rounds=column.round)
    if scaled is None:
        return None
    if column.type is ColumnType.DECIMAL:
        return None if abs(scaled) >= 10**38 else f"{Decimal(scaled).scaleb(-scale):.{scale}f}"
    return scaled if -(2**63) <= scaled < 2**63 else None


def _scaled(number: Decimal, scale: int, *, rounds: bool) -> int | None:
    """The integer of the last digits of *number*, or None when there would be more of them."""
    with localcontext() as context:
        context.prec = 200
        whole = number.scaleb(scale).to_integral_value(ROUND_HALF_UP)  # away from zero, in spite of its name
        return int(whole) if rounds or whole == number.scaleb(scale) else None


def _number(column: SupplierColumn, text: str) -> Decimal | None:
    if column.type is ColumnType.MONEY:
        text = _without(text, _CURRENCIES)
    if column.at_least:
        text = re.sub(rf"^(?:>=|>|≥|(?i:{'|'.join(_MORE)})\.?)", "", text).removesuffix("+")
    bare = text.strip(_BLANKS).replace("−", "-", 1)
    digits = _unparted(bare[1:].lstrip(_BLANKS) if bare[:1] in ("-", "+") else bare)
    plain = None if digits is None else _ungrouped(digits, column.decimal)
    return None if plain is None else Decimal(("-" if bare[0] == "-" else "") + plain)


def _unparted(text: str) -> str | None:
    """Without the blanks between thousands; None where blanks part anything else."""
    if not any(letter in _BLANKS for letter in text):
        return text
    whole, mark, behind = text.partition("," if "," in text else ".")
    first, *parts = re.split(f"[{_BLANKS}]", whole)
    is_parted = 1 <= len(first) <= 3 and first[0] != "0" and all(len(part) == 3 for part in parts)
    are_digits = all(set(part) <= set("0123456789") for part in (first, *parts, behind))
    return first + "".join(parts) + mark + behind if is_parted and are_digits and parts else None


def _without(text: str, words: list[str]) -> str:
    begun = max((word for word in words if text.lower().startswith(word)), key=len, default="")
    text = text[len(begun) :]
    ended = max((word for word in words if text.lower().endswith(word)), key=len, default="")
    return text[: len(text) - len(ended)]


def _ungrouped(text: str, decimal: str | None) -> str | None:
    """Digits with at most one point, or None for what is no number, or could be two."""
    marks = [letter for letter in text if letter in ".,"]
    if not text or any(letter not in "0123456789.," for letter in text) or text[-1] in ".,":
        return None
    if not marks:
        return text
    if len(marks) == 1:
        before, after = text.split(marks[0])
        could_be_grouped = len(after) == 3 and 1 <= len(before) <= 3 and before[0] != "0"
        if could_be_grouped and decimal is None:
            return None
        return before + after if could_be_grouped and decimal != marks[0] else f"{before or 0}.{after}"
    group, last = marks[0], marks[-1]
    whole, behind = (text, "") if last == group else text.split(last) if marks.count(last) == 1 else (text, "")
    parts = whole.split(group)
    is_grouped = 1 <= len(parts[0]) <= 3 and parts[0][0] != "0" and all(len(part) == 3 for part in parts[1:])
    if not is_grouped or any(not part.isdigit() for part in parts):
        return None
    return "".join(parts) + ("." + behind if behind else "")


def _date(column: SupplierColumn, text: str) -> str | None:
    for form in column.formats:
        if moment := _moment(text, form):
            return moment.date().isoformat()
    begun = re.match(r"([0-9]{4}-[0-9]{2}-[0-9]{2})(?:[T ]|$)", text)
    moment = _moment(begun.group(1), "%Y-%m-%d") if begun else None
    return moment.date().isoformat() if moment else None


def _datetime(column: SupplierColumn, text: str) -> str | None:
    iso = ["%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M", "%Y-%m-%d"]
    forms = [form.replace("%T", "%H:%M:%S").replace("%R", "%H:%M") for form in column.formats]
    found = next((moment for form in [*forms, *iso] if (moment := _moment(text, form))), None)
    exact = re.fullmatch(r"(.{10}[T ][0-9]{2}:[0-9]{2})(?:(:[0-9]{2})(?:\.[0-9]+)?)?Z?", text)
    if not found and exact:
        cut = exact[1] + (exact[2] or "")
        found = next((moment for form in iso if (moment := _moment(cut, form))), None)
    return found.strftime("%Y-%m-%dT%H:%M:%S") if found else None


def _moment(text: str, form: str) -> datetime | None:
    try:
        moment = datetime.strptime(text, form)  # noqa: DTZ007 - a supplier says no zone
    except ValueError:
        return None
    return moment if moment.year >= 1000 else None
