"""Generate the reference of the HTTP API from its OpenAPI documents."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from docs.generators.text import code, describe, page, table

import penstock.refdata.pod
from penstock.app.apis import Parts, PublicApis, make_api
from penstock.kernel.http.auth import NoAuthenticator
from penstock.kernel.http.health import LivenessPulse
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.settings import Settings

Json = Mapping[str, Any]
_PODS = Path(penstock.refdata.pod.__file__).parent / "openapi.json"


def api_document() -> Json:
    """Return the OpenAPI document of the API, built with mocked parts."""
    telemetry = Telemetry()
    web = PublicApis(Settings(), telemetry, NoAuthenticator())
    mocks = Parts(**{part.name: MagicMock() for part in fields(Parts)})
    document: Json = make_api(web, LivenessPulse({}, needs=()), mocks).openapi()
    return document


def pods_document() -> Json:
    """Return the OpenAPI document of the query server."""
    document: Json = json.loads(_PODS.read_text())
    return document


def api() -> str:
    """Return the page with every route."""
    return page(
        "HTTP API",
        "An error response is `application/problem+json` with a stable `code`, a `detail` and a `hint`: "
        "[error codes](reason-codes.md). The OpenAPI documents describe bodies and parameters; a running server shows "
        "its own "
        "at `/docs`.",
        "## API server",
        "Port `server.port`, 8080 by default. `penstock up` and `penstock serve api` serve all routes. "
        "`pipeline-apid` serves "
        "`pipeline`, `penstock serve command-api` serves `refdata`, and every role `actuator`. OpenAPI: "
        "[openapi.json](../contracts/openapi.json), and `/openapi.json` of a server.",
        *_groups(api_document()),
        "## Query server",
        "Port `server.query_port`, 8081 by default, of `penstock up` and `penstock serve query-api`. OpenAPI: "
        "[openapi.json](../../src/penstock/refdata/pod/openapi.json), and `/openapi.json` of a server. Every GET "
        "route accepts HEAD.",
        table(
            ["route", "description", "status"],
            (_row(*operation) for operation in _operations(pods_document()) if operation[0] != "head"),
        ),
    )


def _groups(document: Json) -> Iterator[str]:
    """Yield a table per tag, in the order of the document."""
    rows: dict[str, list[tuple[str, str, str]]] = {}
    for method, path, operation in _operations(document):
        rows.setdefault(operation["tags"][0], []).append(_row(method, path, operation))
    for tag, found in rows.items():
        yield f"### {tag}\n\n{table(['route', 'description', 'status'], found)}"


def _operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method != "parameters":
                yield method, path, operation


def _row(method: str, path: str, operation: Json) -> tuple[str, str, str]:
    about = describe(operation.get("description") or operation.get("summary"))
    answers = sorted(answer for answer in operation["responses"] if answer != "default")
    return code(f"{method.upper()} {path}"), about, ", ".join(answers)
