"""The reference of the HTTP APIs, from their OpenAPI documents."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from docs.generators.text import code, page, said, table

import penstock.refdata.pod
from penstock.app.apis import Parts, PublicApis, make_api
from penstock.kernel.http.auth import NoAuthenticator
from penstock.kernel.http.health import LivenessPulse
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.settings import Settings

Json = Mapping[str, Any]
_PODS = Path(penstock.refdata.pod.__file__).parent / "openapi.json"


def api_document() -> Json:
    """The OpenAPI document of the API: what its routes declare, with nobody behind them."""
    telemetry = Telemetry()
    web = PublicApis(Settings(), telemetry, NoAuthenticator())
    nobody = Parts(**{part.name: MagicMock() for part in fields(Parts)})
    document: Json = make_api(web, LivenessPulse({}, needs=()), nobody).openapi()
    return document


def pods_document() -> Json:
    """The OpenAPI document of the query server."""
    document: Json = json.loads(_PODS.read_text())
    return document


def api() -> str:
    """Every route there is."""
    return page(
        "HTTP APIs",
        "A failure is `application/problem+json` with a stable `code`, a `detail` and a `hint`: "
        "[codes](reason-codes.md). Bodies and parameters are in the OpenAPI documents; a running server shows its own "
        "at `/docs`.",
        "## The API",
        "On `server.port`, 8080; `penstock up` and `penstock serve api` serve all of it. `pipeline-apid` serves "
        "`pipeline`, `penstock serve command-api` serves `refdata`, and every role `actuator`. OpenAPI: "
        "[openapi.json](../contracts/openapi.json), and `/openapi.json` of a server.",
        *_groups(api_document()),
        "## The query server",
        "On `server.query_port`, 8081: `penstock up` and `penstock serve query-api`. OpenAPI: "
        "[openapi.json](../../src/penstock/refdata/pod/openapi.json), and `/openapi.json` of a server. HEAD works "
        "wherever GET does.",
        table(
            ["", "", "answers"],
            (_row(*operation) for operation in _operations(pods_document()) if operation[0] != "head"),
        ),
    )


def _groups(document: Json) -> Iterator[str]:
    """A table for each tag, in the order of the document."""
    rows: dict[str, list[tuple[str, str, str]]] = {}
    for method, path, operation in _operations(document):
        rows.setdefault(operation["tags"][0], []).append(_row(method, path, operation))
    for tag, found in rows.items():
        yield f"### {tag}\n\n{table(['', '', 'answers'], found)}"


def _operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method != "parameters":
                yield method, path, operation


def _row(method: str, path: str, operation: Json) -> tuple[str, str, str]:
    about = said(operation.get("description") or operation.get("summary"))
    answers = sorted(answer for answer in operation["responses"] if answer != "default")
    return code(f"{method.upper()} {path}"), about, ", ".join(answers)
