"""Describe the type of a value of a JSON Schema in words."""

from collections.abc import Mapping
from typing import Any, get_args

from docs.generators.text import code

from penstock.kernel.config.loader import SecretRef

_SECRET = get_args(SecretRef)[-1].json_schema["pattern"]
_FORMATS = {"path": "path", "duration": "duration", "date-time": "time, ISO 8601", "uuid": "UUID"}
_KINDS = {"string": "string", "integer": "integer", "number": "number", "boolean": "boolean", "object": "map"}
_LARGEST = 2**63 - 1  # a bound that is only the size of the integer type
Schema = Mapping[str, Any]


def kind_of(schema: Schema, defs: Schema) -> str:
    """Return the type of the value and its bounds."""
    if "$ref" in schema:
        return kind_of(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in schema:
        kinds = [option for option in schema["anyOf"] if option.get("type") != "null"]
        if any(kind.get("format") == "duration" for kind in kinds):
            return "duration"
        return " or ".join(dict.fromkeys(kind_of(kind, defs) for kind in kinds))
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return ", ".join(code(str(choice)) for choice in choices)
    if schema.get("type") == "array":
        return f"list of {kind_of(schema['items'], defs)}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"map of {kind_of(schema['additionalProperties'], defs)}"
    return _plain(schema)


def _plain(schema: Schema) -> str:
    if schema.get("pattern") == _SECRET:
        return "secret"
    if schema.get("format") in _FORMATS:
        return _FORMATS[schema["format"]]
    kind = _KINDS.get(schema.get("type", ""), "any")
    low, high = (None if abs(bound or 0) == _LARGEST else bound for bound in _bounds(schema))
    if low is None and high is None:
        return kind
    if high is None:
        return f"{kind}, {'greater than' if 'exclusiveMinimum' in schema else 'at least'} {low:,}"
    return f"{kind}, at most {high:,}" if low is None else f"{kind}, {low:,} to {high:,}"


def _bounds(schema: Schema) -> tuple[float | None, float | None]:
    return schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
