"""The reference of all that can be set, from the models that read it."""

from collections.abc import Iterator, Mapping
from datetime import timedelta
from enum import Enum
from typing import Any, get_args, get_origin

from docs.generators.kinds import kind_of
from docs.generators.text import code, page, said, table
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from penstock.flows.definition.spec import FlowSpec
from penstock.ingest.supplier import Supplier
from penstock.kernel.config.loader import ENV_PREFIX
from penstock.settings import Settings

_UNITS = [
    (timedelta(days=1), "day"),
    (timedelta(hours=1), "h"),
    (timedelta(minutes=1), "min"),
    (timedelta(seconds=1), "s"),
]
NAME, ITEM = "NAME", "[]"
Path = tuple[str, ...]


def configuration() -> str:
    """Every key of penstock.yaml, of a supplier's file and of a flow's."""
    return page(
        "Configuration keys",
        "What each file means, and in which order files, environment and command line count, is told in "
        "[configuration](../configuration.md). `NAME` stands for a name of your own, `[]` for each item of a list. "
        "Below a key of penstock.yaml stands the variable that sets it; what is in a list is set with the whole list, "
        "as YAML. A secret is `env:NAME` or `file:/path`. A duration is a number of seconds or ISO 8601, as `PT30S`.",
        "## penstock.yaml",
        *dict.fromkeys(_sections(Settings, (), has_variables=True)),  # what two kinds of a source share comes once
        "## A supplier's file",
        "`etl_ops/config/SUPPLIER.yaml`, see [ingest](../ingest.md).",
        *_sections(Supplier, ()),
        "## A flow's file",
        "`*.yaml` in `flows.folder`, see [flows](../flows.md).",
        *_sections(FlowSpec, ()),
    )


def _sections(model: type[BaseModel], path: Path, *, has_variables: bool = False) -> Iterator[str]:
    """A table of the keys of *model*, and what is below it."""
    schema = model.model_json_schema(by_alias=True)
    rows, sections = [], []
    for name, field in model.model_fields.items():
        key = (*path, field.alias or name)
        inner = list(below(field.annotation, key))
        sections += [(field, one, place) for one, place in inner]
        if not inner:
            rows.append(_row(field, key, schema, has_variables=has_variables))
    yield table(["key", "kind", "default", ""], rows)
    for field, one, place in sections:
        yield f"### {'.'.join(place).replace('.[]', '[]')}{_choice(one)}\n\n{said(one.__doc__)}{_presence(field)}"
        yield from _sections(one, place, has_variables=has_variables)


def _row(field: FieldInfo, key: Path, schema: Mapping[str, Any], *, has_variables: bool) -> tuple[str, ...]:
    shown = code(".".join(key).replace(".[]", "[]"))
    if has_variables and ITEM not in key:
        shown += "<br>" + code(ENV_PREFIX + "__".join(key).upper())
    kind = kind_of(schema["properties"][key[-1]], schema.get("$defs", {}))
    return shown, kind, "required" if field.is_required() else _default(field), said(field.description)


def below(annotation: Any, path: Path) -> Iterator[tuple[type[BaseModel], Path]]:
    """The sections a key can hold, and where each is."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, path
        return
    more = {dict: (NAME,), list: (ITEM,)}.get(get_origin(annotation) or annotation, ())
    for inner in get_args(annotation):
        yield from below(inner, (*path, *more))


def _choice(model: type[BaseModel]) -> str:
    """What makes it this section and no other."""
    kinds = [get_args(field.annotation) for name, field in model.model_fields.items() if name == "kind"]
    return f", kind: {kinds[0][0]}" if kinds and len(kinds[0]) == 1 else ""


def _presence(field: FieldInfo) -> str:
    more = f" {said(field.description)}" if field.description else ""
    if field.is_required() or field.get_default(call_default_factory=True) not in (None, [], {}):
        return more
    return f"{more} There is none unless it is given."


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default in (None, [], {}, ""):
        return "none"
    if isinstance(default, timedelta):
        return _duration(default)
    if isinstance(default, list):
        return ", ".join(code(str(one)) for one in default)
    if isinstance(default, bool):
        return code(str(default).lower())
    return code(str(default.value if isinstance(default, Enum) else default))


def _duration(span: timedelta) -> str:
    for unit, name in _UNITS:
        if span >= unit and not span % unit:
            count = span // unit
            return f"{count} {name}{'s' if name == 'day' and count > 1 else ''}"
    return f"{span.total_seconds():g} s"
