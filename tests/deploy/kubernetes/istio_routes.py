"""What the VirtualService of deploy/istio says, read as Envoy reads it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.support.types import Json

FOLDER = Path(__file__).parents[3] / "deploy" / "istio"


@dataclass(frozen=True)
class Route:
    """One entry of the table: whom it leads to, and how."""

    name: str
    matches: list[Json]
    host: str | None
    timeout: float | None
    attempts: int | None
    conditions: frozenset[str]

    @property
    def role(self) -> str | None:
        return self.host.partition(".")[0].removeprefix("penstock-") if self.host else None

    def takes(self, method: str, path: str) -> bool:
        return any(
            _fits(match["uri"], path) and ("method" not in match or _fits(match["method"], method))
            for match in self.matches
        )


@cache
def objects(*names: str) -> list[dict[str, Any]]:
    """Every object in those files, else in all that kustomize applies."""
    files = names or YAML(typ="safe").load(FOLDER / "kustomization.yaml")["resources"]
    return [found for name in files for found in YAML(typ="safe").load_all(FOLDER / name)]


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [found for found in objects() if found["kind"] == kind]


@cache
def table() -> list[Route]:
    """Every route, in order."""
    [service] = of_kind("VirtualService")
    return [_route(found) for found in service["spec"]["http"]]


def chosen(method: str, path: str) -> Route | None:
    """The first route that takes a request; a path is without its query."""
    return next((route for route in table() if route.takes(method, path)), None)


def patterns() -> Iterator[str]:
    for route in table():
        for match in route.matches:
            yield from (text["regex"] for text in match.values() if "regex" in text)


def _route(found: Json) -> Route:
    [to] = found.get("route", [{"destination": {"host": None}}])
    retries = found.get("retries", {})
    return Route(
        name=found["name"],
        matches=found["match"],
        host=to["destination"]["host"],
        timeout=float(found["timeout"].removesuffix("s")) if "timeout" in found else None,
        attempts=retries.get("attempts"),
        conditions=frozenset(retries.get("retryOn", "").split(",")) - {""},
    )


def _fits(wanted: Json, text: str) -> bool:
    [(how, value)] = wanted.items()
    if how == "regex":
        return re.fullmatch(value, text) is not None
    return text == value if how == "exact" else text.startswith(value)
