"""A reference implementation of ingest for delimited files, in plain Python, a cell at a time."""

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
    """The expected files and statistics of a run."""

    facts: list[dict[str, Any]] = field(default_factory=list)
    bad: list[dict[str, Any]] = field(default_factory=list)
    blank: int = 0
    skipped: int = 0


def expect_files(rows: list[list[str]], supplier: Supplier, run_id: str, name: str) -> Expected:
    """Return the facts and bad rows of *rows*, of which the first is the header."""
    result = Expected()
    begin = {"run_id": run_id, "supplier": name}
    above: dict[str, str] = {}
    for number, row in enumerate(rows[1:], start=2):
        cells = {
            name: row[rows[0].index(str(column.source))] if rows[0].index(str(column.source)) < len(row) else ""
            for name, column in supplier.columns.items()
        }
        first = next((text for cell in row if (text := strip_cell(cell))), None)
        if first and any(re.search(pattern, first) for pattern in supplier.source.skip_rows):
            result.skipped += 1
            continue
        is_too_long = any(strip_cell(cell) for cell in row[len(rows[0]) :])
        if not is_too_long and not any(strip_cell(cell) for cell in cells.values()):
            result.blank += 1
            continue
        for name in [name for name, column in supplier.columns.items() if column.fill_down]:
            cells[name] = above[name] = strip_cell(cells[name]) or above.get(name, "")
        payload, bad_row = _validate_row(cells, supplier)
        bad_row = {"reason_code": "ROW_TOO_LONG", "column": None, "raw_value": None} if is_too_long else bad_row
        if bad_row:
            visible = {name: bad_row[name] for name in bad_row if supplier.keep_raw or name != "raw_value"}
            result.bad.append({**begin, "row_number": number, **visible})
        else:
            row_id = hashlib.sha256(encode_canonical(payload)).hexdigest()
            result.facts.append({**begin, "row_id": row_id, "row_number": number, "payload": payload})
    _apply_duplicate_keys(result, supplier, begin)
    return result


def encode_ndjson(lines: list[dict[str, Any]]) -> bytes:
    texts = []
    for line in lines:
        known = {key: value for key, value in line.items() if key != "payload"}
        text = json.dumps(known, ensure_ascii=False, separators=(",", ":")).encode()
        payload = b',"payload":' + encode_canonical(line["payload"]) + b"}" if "payload" in line else b"}"
        texts.append(text[:-1] + payload + b"\n")
    return b"".join(texts)


def encode_canonical(payload: dict[str, Value]) -> bytes:
    """Encode a payload as RFC 8785 does: names are sorted by UTF-16 code units."""
    names = sorted(payload, key=lambda name: name.encode("utf-16-be"))
    ordered = {name: payload[name] for name in names}
    return json.dumps(ordered, ensure_ascii=False, separators=(",", ":")).encode()


def strip_cell(text: str) -> str:
    return text.strip(_WHITE)


def _apply_duplicate_keys(result: Expected, supplier: Supplier, begin: dict[str, str]) -> None:
    if not supplier.key or supplier.duplicate_keys == "keep":
        return
    unique: dict[tuple[Value, ...], dict[str, Any]] = {}
    for fact in result.facts if supplier.duplicate_keys == "first" else reversed(result.facts):
        unique.setdefault(tuple(fact["payload"][name] for name in supplier.key), fact)
    numbers = {fact["row_number"] for fact in unique.values()}
    dropped = [fact["row_number"] for fact in result.facts if fact["row_number"] not in numbers]
    result.facts = [fact for fact in result.facts if fact["row_number"] in numbers]
    bad = {"reason_code": "KEY_DUPLICATE", "column": ", ".join(supplier.key)}
    result.bad += [{**begin, "row_number": number, **bad} for number in dropped]


def _validate_row(cells: dict[str, str], supplier: Supplier) -> tuple[dict[str, Value], dict[str, Any] | None]:
    payload: dict[str, Value] = {}
    bad_row = None
    for name, column in supplier.columns.items():
        payload[name], reason = read_value(column, cells[name], is_required=column.required or name in supplier.key)
        if reason and not bad_row:
            bad_row = {"reason_code": reason, "column": name, "raw_value": cells[name][:200]}
    return payload, bad_row


def read_value(column: SupplierColumn, raw: str, *, is_required: bool) -> tuple[Value, str | None]:
    """Return the value of a cell, and the reason if it is bad."""
    for pattern, by in column.replace.items():
        raw = re.sub(pattern, by, raw)
    text = strip_cell(raw)
    if text in ("", *column.empty):
        return column.default, "REQUIRED_MISSING" if is_required and column.default is None else None
    if column.extract:
        match = re.search(column.extract, text)
        if not match:
            return None, "PATTERN_MISMATCH"
        text = strip_cell(match.group(1 if match.re.groups else 0))
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
        values = column.values if isinstance(column.values, dict) else {value: value for value in column.values or []}
        return {key.strip().lower(): value for key, value in values.items()}.get(text.lower())
    if column.type is ColumnType.DATE:
        return _date(column, text)
    if column.type is ColumnType.DATETIME:
        return _datetime(column, text)
    scale = 0 if column.type is ColumnType.INTEGER else column.scale
    number = _number(column, text)
    scaled = None if number is None else _scale(number, scale, rounds=column.round)
    if scaled is None:
        return None
    if column.type is ColumnType.DECIMAL:
        return None if abs(scaled) >= 10**38 else f"{Decimal(scaled).scaleb(-scale):.{scale}f}"
    return scaled if -(2**63) <= scaled < 2**63 else None


def _scale(number: Decimal, scale: int, *, rounds: bool) -> int | None:
    """Return *number* as an integer with *scale* decimal places; None if it has more."""
    with localcontext() as context:
        context.prec = 200
        whole = number.scaleb(scale).to_integral_value(ROUND_HALF_UP)  # away from zero, despite its name
        return int(whole) if rounds or whole == number.scaleb(scale) else None


def _number(column: SupplierColumn, text: str) -> Decimal | None:
    if column.type is ColumnType.MONEY:
        text = _without(text, _CURRENCIES)
    if column.at_least:
        text = re.sub(rf"^(?:>=|>|≥|(?i:{'|'.join(_MORE)})\.?)", "", text).removesuffix("+")
    bare = text.strip(_BLANKS).replace("−", "-", 1)
    digits = _remove_blanks(bare[1:].lstrip(_BLANKS) if bare[:1] in ("-", "+") else bare)
    plain = None if digits is None else _remove_groups(digits, column.decimal)
    return None if plain is None else Decimal(("-" if bare[0] == "-" else "") + plain)


def _remove_blanks(text: str) -> str | None:
    """Remove the blanks between groups of thousands; None if blanks separate anything else."""
    if not any(letter in _BLANKS for letter in text):
        return text
    whole, mark, fraction = text.partition("," if "," in text else ".")
    first, *parts = re.split(f"[{_BLANKS}]", whole)
    is_parted = 1 <= len(first) <= 3 and first[0] != "0" and all(len(part) == 3 for part in parts)
    are_digits = all(set(part) <= set("0123456789") for part in (first, *parts, fraction))
    return first + "".join(parts) + mark + fraction if is_parted and are_digits and parts else None


def _without(text: str, words: list[str]) -> str:
    prefix = max((word for word in words if text.lower().startswith(word)), key=len, default="")
    text = text[len(prefix) :]
    ended = max((word for word in words if text.lower().endswith(word)), key=len, default="")
    return text[: len(text) - len(ended)]


def _remove_groups(text: str, decimal: str | None) -> str | None:
    """Return the digits with at most a point; None if the text is not a number, or ambiguous."""
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
    whole, fraction = (text, "") if last == group else text.split(last) if marks.count(last) == 1 else (text, "")
    parts = whole.split(group)
    is_grouped = 1 <= len(parts[0]) <= 3 and parts[0][0] != "0" and all(len(part) == 3 for part in parts[1:])
    if not is_grouped or any(not part.isdigit() for part in parts):
        return None
    return "".join(parts) + ("." + fraction if fraction else "")


def _date(column: SupplierColumn, text: str) -> str | None:
    for form in column.formats:
        if moment := _moment(text, form):
            return moment.date().isoformat()
    match = re.match(r"([0-9]{4}-[0-9]{2}-[0-9]{2})(?:[T ]|$)", text)
    moment = _moment(match.group(1), "%Y-%m-%d") if match else None
    return moment.date().isoformat() if moment else None


def _datetime(column: SupplierColumn, text: str) -> str | None:
    iso = ["%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M", "%Y-%m-%d"]
    forms = [form.replace("%T", "%H:%M:%S").replace("%R", "%H:%M") for form in column.formats]
    result = next((moment for form in [*forms, *iso] if (moment := _moment(text, form))), None)
    exact = re.fullmatch(r"(.{10}[T ][0-9]{2}:[0-9]{2})(?:(:[0-9]{2})(?:\.[0-9]+)?)?Z?", text)
    if not result and exact:
        cut = exact[1] + (exact[2] or "")
        result = next((moment for form in iso if (moment := _moment(cut, form))), None)
    return result.strftime("%Y-%m-%dT%H:%M:%S") if result else None


def _moment(text: str, form: str) -> datetime | None:
    try:
        moment = datetime.strptime(text, form)  # noqa: DTZ007 - a supplier says no zone
    except ValueError:
        return None
    return moment if moment.year >= 1000 else None
