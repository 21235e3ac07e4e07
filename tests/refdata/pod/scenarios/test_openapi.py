"""R27: the responses of a pod conform to its OpenAPI document, and the document is complete."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jwt
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok
from schemathesis.core.transport import Response
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

import penstock.refdata.pod
from penstock.kernel.db import page as paging
from penstock.kernel.http.auth import JwtAuthenticator
from penstock.kernel.http.keys import SharedSecret
from penstock.refdata.pod.serve.request import KEYS_LIMIT
from penstock.settings import Settings
from tests.refdata.pod.harness import PodHarness, running_pod

HERE = Path(penstock.refdata.pod.__file__).parent
DOCUMENT: dict[str, Any] = json.loads((HERE / "openapi.json").read_text())
BASE = "/v1/tenants/{tenantId}/dictionaries/{dictCode}"
FEED = f"{BASE}/changes"
KNOWN = {"tenantId": "acme", "dictCode": "LOOSE"}
ITEMS = {"a": {"n": 1}, "b/ö": [2], "c,d": "text", "long" * 128: 4}
SECRET = "a secret of thirty-two bytes or more"
SENSE, NONSENSE = 5, 8  # examples of each operation
# A well-formed cursor can be foreign, unused parameters are ignored, and unknown names are 404.
UNDECIDABLE: Any = [positive_data_acceptance, negative_data_rejection]
# Errors of loads: a reader gets NOT_LOADED.
INSIDE = {"MEMORY_FULL", "LOAD_FAILED", "DATABASE_SLOW"}

Operation = APIOperation[Any, Any, Any, Any]
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # created by schemathesis
    # Hypothesis would report the random numbers of the pod as flaky.
    pytest.mark.filterwarnings("ignore:Do not use the `random` module:FutureWarning"),
]


@dataclass(frozen=True)
class DeclaredRequest:
    """A request with the parameters of the document, and the expected status."""

    status: int
    path: str
    path_parameters: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


ASKED = [
    DeclaredRequest(200, f"{BASE}/items/{{key}}", {**KNOWN, "key": "a"}),
    DeclaredRequest(
        200, f"{BASE}/items/{{key}}", {**KNOWN, "key": "b/ö"}, {}, {"X-Min-Version": "1", "X-Request-Id": "mine"}
    ),
    DeclaredRequest(200, f"{BASE}/items/{{key}}", {**KNOWN, "key": "long" * 128}),
    DeclaredRequest(304, f"{BASE}/items/{{key}}", {**KNOWN, "key": "a"}, {}, {"If-None-Match": "*"}),
    DeclaredRequest(400, f"{BASE}/items/{{key}}", {**KNOWN, "key": "a"}, {}, {"X-Min-Version": "soon"}),
    DeclaredRequest(400, f"{BASE}/items/{{key}}", {**KNOWN, "key": "k" * 513}),
    DeclaredRequest(403, f"{BASE}/items/{{key}}", {**KNOWN, "key": "a", "tenantId": "globex"}),
    DeclaredRequest(404, f"{BASE}/items/{{key}}", {**KNOWN, "key": "none"}),
    DeclaredRequest(409, f"{BASE}/items/{{key}}", {**KNOWN, "key": "a"}, {}, {"X-Min-Version": "1000"}),
    DeclaredRequest(200, f"{BASE}/items", KNOWN, {"keys": ["a", "none"], "key": ["c,d", "b/ö"]}),
    DeclaredRequest(304, f"{BASE}/items", KNOWN, {"key": ["a"]}, {"If-None-Match": "*"}),
    DeclaredRequest(422, f"{BASE}/items", KNOWN),
    DeclaredRequest(422, f"{BASE}/items", KNOWN, {"keys": [str(number) for number in range(KEYS_LIMIT + 1)]}),
    DeclaredRequest(200, f"{BASE}/all", KNOWN, {"limit": 2}),
    DeclaredRequest(200, f"{BASE}/all", KNOWN, {}, {"Accept": "application/x-ndjson"}),
    DeclaredRequest(400, f"{BASE}/all", KNOWN, {"limit": 10_001}),
    DeclaredRequest(422, f"{BASE}/all", KNOWN, {"cursor": "bm90aGluZw"}),
    DeclaredRequest(410, f"{BASE}/all", KNOWN, {"cursor": paging.encode_cursor([1, 1, False, "00"])}),
    DeclaredRequest(200, f"{BASE}/version", KNOWN),
    DeclaredRequest(404, f"{BASE}/version", {**KNOWN, "dictCode": "NONE"}),
    DeclaredRequest(409, f"{BASE}/version", KNOWN, {}, {"X-Min-Version": "1000"}),
    DeclaredRequest(400, FEED, KNOWN, {"since": "soon"}),
    DeclaredRequest(400, FEED, KNOWN, {}, {"Last-Event-ID": "-1"}),
    DeclaredRequest(200, f"{BASE}/audit", KNOWN),
    DeclaredRequest(200, "/actuator/health"),
    DeclaredRequest(200, "/actuator/health/liveness"),
    DeclaredRequest(200, "/actuator/health/readiness"),
    DeclaredRequest(200, "/actuator/prometheus"),
    DeclaredRequest(200, "/healthz"),
    DeclaredRequest(200, "/readyz"),
    DeclaredRequest(200, "/metrics"),
]


def token(**claims: object) -> dict[str, str]:
    known = {"sub": "ann", "tenant_id": "acme", "exp": 4_000_000_000}
    return {"Authorization": "Bearer " + jwt.encode({**known, **claims}, SECRET, algorithm="HS256")}


@pytest.fixture
async def guarded(pod_settings: Settings, tmp_path: Path) -> AsyncIterator[PodHarness]:
    """Yield a pod with authentication and some items."""
    authenticator = JwtAuthenticator(SharedSecret(SECRET), algorithms=["HS256"])
    async with running_pod(pod_settings, tmp_path, authenticator) as harness:
        await harness.put_and_load("LOOSE", ITEMS)
        yield harness


def operations(address: str) -> list[Operation]:
    """Return the operations in the document of the pod at *address*."""
    found = schemathesis.openapi.from_url(f"{address}/openapi.json").get_all_operations()
    return [result.ok() for result in found if isinstance(result, Ok)]


def probe(operation: Operation, mode: GenerationMode, examples: int, **fixed: Any) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy(generation_mode=mode, **fixed))
    def ask(case: Case[Any]) -> None:
        case.call_and_validate(headers=token(), excluded_checks=UNDECIDABLE)

    ask()


@pytest.mark.full
async def test_whatever_is_sent_is_answered_as_declared(guarded: PodHarness) -> None:
    """R27: for any request the status, headers and body are declared and not 5xx, and 401 without a token."""
    for operation in await asyncio.to_thread(operations, guarded.address):
        if (operation.path, operation.method) == (FEED, "get"):  # the stream has no end
            continue
        is_read = operation.path.startswith(BASE)
        fixed = {"path_parameters": KNOWN} if is_read else {}
        await asyncio.to_thread(probe, operation, GenerationMode.POSITIVE, SENSE, **fixed)
        if is_read and operation.method == "get":
            await asyncio.to_thread(probe, operation, GenerationMode.NEGATIVE, NONSENSE)


async def test_every_route_answers_as_declared(guarded: PodHarness) -> None:
    """R17, R27: every route of the document answers GET and HEAD with the declared status, headers and body."""
    known = {
        (operation.path, operation.method): operation
        for operation in await asyncio.to_thread(operations, guarded.address)
    }
    for asked in ASKED:
        for method in ("get", "head"):
            operation, status = known[asked.path, method], asked.status
            case = operation.Case(
                path_parameters={name: quote(value, safe="") for name, value in asked.path_parameters.items()},
                query=dict(asked.query),
                headers={**asked.headers, **token()},
            )
            answer = await asyncio.to_thread(case.call_and_validate, excluded_checks=UNDECIDABLE)
            assert answer.status_code == status, (asked, method, answer.text)
            assert bool(answer.content) == (method == "get" and status != 304), (asked, method)
            assert undeclared(answer, operation) == set(), asked
    assert {asked.path for asked in ASKED} == set(DOCUMENT["paths"])


async def test_the_change_stream_is_as_declared(guarded: PodHarness) -> None:
    """R27, R31: the stream of changes has the declared headers, and its events the declared fields."""
    path = FEED.format(**KNOWN)
    async with guarded.session.get(guarded.address + path, params={"since": "0"}, headers=token()) as feed:
        declared = resolved(DOCUMENT["paths"][FEED]["get"]["responses"]["200"])
        assert {name for name, header in declared["headers"].items() if resolved(header).get("required")} <= set(
            feed.headers
        )
        assert [feed.content_type] == list(declared["content"])
        comment, _, kind, number, data = [await feed.content.readline() for _ in range(5)]
    assert (comment, number) == (b": 1\n", b"id: 1\n")
    change = json.loads(data.removeprefix(b"data: "))
    assert (kind, change) in [
        (b"event: reset\n", {"version": 1}),
        (b"event: change\n", {"version": 1, "since": 0, "keys": sorted(ITEMS)}),
    ]


async def test_the_document_is_served(guarded: PodHarness) -> None:
    """R27: `/openapi.json` and `/docs` are served without a token and without foreign assets."""
    async with guarded.session.get(f"{guarded.address}/openapi.json") as answer:
        assert (answer.status, answer.content_type) == (200, "application/json")
        assert await answer.json() == DOCUMENT
    async with guarded.session.get(f"{guarded.address}/docs") as answer:
        page = await answer.text()
        assert (answer.status, answer.content_type) == (200, "text/html")
    assert "/openapi.json" in page
    assets = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert assets
    for asset in assets:
        async with guarded.session.get(guarded.address + asset) as answer:
            assert answer.status == 200, asset


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_other_methods_are_refused_as_declared(guarded: PodHarness, method: str) -> None:
    """R17, R27: other methods get 405 with the allowed methods, without authentication."""
    async with guarded.session.request(method, guarded.address + f"{BASE}/version".format(**KNOWN)) as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
        assert (await answer.json(content_type="application/problem+json"))["code"] == "METHOD_NOT_ALLOWED"


def test_every_code_is_declared() -> None:
    """R27: the document contains every error code that a pod can return."""
    raised = re.compile(r"\b[A-Z]\w+\(\s*\"([A-Z][A-Z_]+)\"")
    codes = {code for module in HERE.rglob("*.py") for code in raised.findall(module.read_text())}
    assert len(codes) > 15
    text = json.dumps(DOCUMENT["components"]["responses"])
    assert {code for code in codes - INSIDE if not re.search(rf"\b{code}\b", text)} == set()


def test_every_reference_leads_somewhere() -> None:
    """R27: every reference in the document exists, and every component is used."""
    referred = set(re.findall(r'"\$ref": "#/components/(\w+/\w+)"', json.dumps(DOCUMENT)))
    kept = {f"{kind}/{name}" for kind, parts in DOCUMENT["components"].items() for name in parts}
    assert referred == kept - {"securitySchemes/bearer"}


def undeclared(answer: Response, operation: Operation) -> set[str]:
    """Return the headers and fields of *response* that the document does not declare."""
    declared = resolved(DOCUMENT["paths"][operation.path][operation.method]["responses"][str(answer.status_code)])
    headers = {name for name in answer.headers if name.startswith(("x-d", "x-request"))}
    unknown = headers - {name.lower() for name in declared.get("headers", {})}
    kind = answer.headers["content-type"][0].partition(";")[0]
    if answer.content and kind.endswith(("/json", "+json")) and not operation.path.endswith("{key}"):
        schema = resolved(declared["content"][kind]["schema"])
        unknown |= set(answer.json()) - set(schema["properties"])
    return unknown


def resolved(part: dict[str, Any]) -> dict[str, Any]:
    """Return *part* with its reference resolved."""
    found: Any = part
    if "$ref" in part:
        found = DOCUMENT
        for name in part["$ref"].removeprefix("#/").split("/"):
            found = found[name]
    kept: dict[str, Any] = found
    return kept
