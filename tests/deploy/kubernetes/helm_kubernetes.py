"""Kubernetes' own schemas of its objects, as the package kubernetes-validate carries them."""

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

_SCHEMAS = files("kubernetes_validate") / "kubernetes-json-schema"


def newest() -> str:
    """The newest version there are schemas of."""
    names = [re.fullmatch(r"v1\.(\d+)\.0-local-strict", folder.name) for folder in _SCHEMAS.iterdir()]
    return f"1.{max(int(name[1]) for name in names if name)}"


def mistakes(resource: Mapping[str, Any], version: str) -> list[str]:
    """What a Kubernetes of *version* would not understand of the object; unknown fields too."""
    group = re.sub(r"^([^./]*)(\.[^/]*)?/", r"\1-", resource["apiVersion"])
    found = _validator(version, f"{resource['kind'].lower()}-{group}.json").iter_errors(resource)
    return [f"{resource['kind']} {resource['metadata']['name']} {error.json_path}: {error.message}" for error in found]


@cache
def _validator(version: str, name: str) -> Draft202012Validator:
    return Draft202012Validator(_read(version, name), registry=_definitions(version))


@cache
def _definitions(version: str) -> Registry[Any]:
    definitions: Resource[Any] = Resource.from_contents(_read(version, "_definitions.json"))
    return definitions @ Registry()


def _read(version: str, name: str) -> Any:
    return json.loads((_SCHEMAS / f"v{version}.0-local-strict" / name).read_bytes())
