"""Generate the reference of settings from the models that read them."""

from collections.abc import Iterator, Mapping
from datetime import timedelta
from enum import Enum
from typing import Any, get_args, get_origin

from docs.generators.kinds import kind_of
from docs.generators.text import code, describe, page, table
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
    """Return the page with every key of penstock.yaml, of supplier files and of flow files."""
    return page(
        "Settings",
        "[Configuration](../configuration.md) describes the files and the precedence of file, environment and command "
        "line. `NAME` is a "
        "name that you choose, `[]` each item of a list. The table shows the environment variable below "
        "each key of "
        "penstock.yaml; a list is set as a whole, as YAML. A secret is `env:NAME` or `file:/path`. A duration is a "
        "number of "
        "seconds or an ISO 8601 duration such as `PT30S`.",
        "## penstock.yaml",
        *dict.fromkeys(
            _sections(Settings, (), has_variables=True)
        ),  # sections that several kinds of a source share appear once
        "## Supplier file",
        "`etl_ops/config/SUPPLIER.yaml`, see [ingest](../ingest.md).",
        *_sections(Supplier, ()),
        "## Flow file",
        "`*.yaml` in `flows.folder`, see [flows](../flows.md).",
        *_sections(FlowSpec, ()),
    )


def _sections(model: type[BaseModel], path: Path, *, has_variables: bool = False) -> Iterator[str]:
    """Yield a table of the keys of *model*, and its subsections."""
    schema = model.model_json_schema(by_alias=True)
    rows, sections = [], []
    for name, field in model.model_fields.items():
        key = (*path, field.alias or name)
        inner = list(below(field.annotation, key))
        sections += [(field, section, section_path) for section, section_path in inner]
        if not inner:
            rows.append(_row(field, key, schema, has_variables=has_variables))
    yield table(["key", "type", "default", "description"], rows)
    for field, section, place in sections:
        heading = ".".join(place).replace(".[]", "[]") + _choice(section)
        yield f"### {heading}\n\n{describe(section.__doc__)}{_presence(field)}"
        yield from _sections(section, place, has_variables=has_variables)


def _row(field: FieldInfo, key: Path, schema: Mapping[str, Any], *, has_variables: bool) -> tuple[str, ...]:
    shown = code(".".join(key).replace(".[]", "[]"))
    if has_variables and ITEM not in key:
        shown += "<br>" + code(ENV_PREFIX + "__".join(key).upper())
    kind = kind_of(schema["properties"][key[-1]], schema.get("$defs", {}))
    return shown, kind, "required" if field.is_required() else _default(field), describe(field.description)


def below(annotation: Any, path: Path) -> Iterator[tuple[type[BaseModel], Path]]:
    """Yield the sections that a key can contain, with their paths."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, path
        return
    more = {dict: (NAME,), list: (ITEM,)}.get(get_origin(annotation) or annotation, ())
    for inner in get_args(annotation):
        yield from below(inner, (*path, *more))


def _choice(model: type[BaseModel]) -> str:
    """Return the `kind` that selects this section."""
    kinds = [get_args(field.annotation) for name, field in model.model_fields.items() if name == "kind"]
    return f", kind: {kinds[0][0]}" if kinds and len(kinds[0]) == 1 else ""


def _presence(field: FieldInfo) -> str:
    more = f" {describe(field.description)}" if field.description else ""
    if field.is_required() or field.get_default(call_default_factory=True) not in (None, [], {}):
        return more
    return f"{more} Not set by default."


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default in (None, [], {}, ""):
        return "none"
    if isinstance(default, timedelta):
        return _duration(default)
    if isinstance(default, list):
        return ", ".join(code(str(item)) for item in default)
    if isinstance(default, bool):
        return code(str(default).lower())
    return code(str(default.value if isinstance(default, Enum) else default))


def _duration(span: timedelta) -> str:
    for unit, name in _UNITS:
        if span >= unit and not span % unit:
            count = span // unit
            return f"{count} {name}{'s' if name == 'day' and count > 1 else ''}"
    return f"{span.total_seconds():g} s"
