"""The API of ingest in a running `penstock up`: the response of every route, and access to it."""

import json
import re
import signal
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import httpx
import pytest

from penstock.app.platform import open_ingest_workspace
from penstock.ingest.run.hooks import RunHooks
from penstock.ingest.tree import paths
from penstock.settings import Settings
from tests.app.scenarios.test_openapi import WITH_TOKENS, token
from tests.ingest.harness import KEYED, QUICK, SUPPLIER, IngestHarness, snapshot
from tests.services.postgres import module_database
from tests.support.http import answered
from tests.support.processes import Up
from tests.support.settings import write_config
from tests.support.types import Json
from tests.support.wait import until

ONE, TWO, THREE = (snapshot({"A": price, "B": 2}) for price in (1, 2, 3))
BROKEN = snapshot({"A": "none", "B": "none"})


@pytest.fixture(scope="module")
def server_database() -> Iterator[str]:
    """Yield the URL of a database for the server of the module."""
    with module_database() as url:
        yield url


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> IngestHarness:
    """Return a harness with two publications and a failed run."""
    return IngestHarness(tmp_path_factory.mktemp("served") / "root", {**KEYED, "keep_raw": True})


@pytest.fixture(scope="module")
def api(served: IngestHarness, server_database: str) -> Iterator[str]:
    """Yield the URL of the ingest API of a running `penstock up`."""
    config = {"database": {"url": server_database}, "ingest": {"root": str(served.root), **QUICK}}
    with open_ingest_workspace(Settings.model_validate(config), uses_database=True) as workspace:
        for content in (ONE, BROKEN, TWO):
            served.drop(content)
            workspace.run(SUPPLIER, RunHooks(), waits=False)
    folder = served.root.parent
    write_config(folder, config)
    with Up(folder) as up:
        yield f"{up.api}/api/v1/ingest"


def get(url: str, **params: Any) -> Json:
    return answered(httpx.get(url, params=params))


def test_file_in_the_inbox_is_published_automatically(api: str, served: IngestHarness) -> None:
    """I23: `penstock up` watches the inboxes; every route of the API shows the publication."""
    served.configure(KEYED, "globex")
    served.drop(ONE, supplier="globex")
    until(lambda: bool(get(f"{api}/runs", supplier="globex", status="PASS")["runs"]), "it is published")
    (run,) = get(f"{api}/runs", supplier="globex")["runs"]
    assert run["runId"] == served.current("globex")
    details = get(f"{api}/runs/{run['runId']}")
    assert details["manifest"] == served.read_json(paths.make_run_path(run["runId"], paths.MANIFEST))
    assert [(move["from"], move["to"]) for move in details["history"]] == [(None, "RUNNING"), ("RUNNING", "PASS")]
    assert [(move["fileName"], move["reason"]) for move in details["moves"]] == [("price.csv", "published")]
    assert get(f"{api}/suppliers/globex/moves")["moves"] == details["moves"]
    status = {supplier["supplier"]: supplier for supplier in get(f"{api}/suppliers")["suppliers"]}["globex"]
    assert (status["runId"], status["facts"], status["fence"]) == (run["runId"], 2, 1)
    assert get(f"{api}/suppliers/globex")["alerts"] == []


def test_state_is_streamed_completely(api: str, served: IngestHarness) -> None:
    """I14, §17: the facts are NDJSON whose sha256 is that of the pointer and the ETag; headers name the state."""
    state = get(f"{api}/state/{SUPPLIER}")
    assert (state["runId"], state["fence"], state["manifest"]["status"]) == (served.current(), 2, "PASS")
    facts = httpx.get(f"{api}/state/{SUPPLIER}/facts")
    assert facts.headers["content-type"] == "application/x-ndjson"
    assert sha256(facts.content).hexdigest() == state["sha256"]
    assert facts.headers["etag"] == f'"{state["sha256"]}"'
    assert (facts.headers["x-run-id"], facts.headers["x-fence"]) == (state["runId"], "2")
    assert [json.loads(line) for line in facts.text.splitlines()] == served.facts()


def test_runs_are_paged(api: str) -> None:
    """Runs are listed newest first; the pages contain every run once."""
    unpaged = get(f"{api}/runs", supplier=SUPPLIER)
    assert ([run["status"] for run in unpaged["runs"]], unpaged["next"]) == (["PASS", "FAIL", "PASS"], None)
    paged: list[Json] = []
    cursor: Json = {}
    for _ in unpaged["runs"]:
        page = get(f"{api}/runs", supplier=SUPPLIER, limit=1, **cursor)
        paged += page["runs"]
        cursor = {"cursor": page["next"]}
    assert paged == unpaged["runs"]
    assert cursor == {"cursor": None}
    failed = get(f"{api}/runs", status="FAIL")["runs"]
    bad = get(f"{api}/runs/{failed[0]['runId']}/bad-rows", limit=1)
    assert (bad["badRows"], bad["reasons"], len(bad["rows"])) == (2, {"NOT_INTEGER": 2}, 1)
    assert bad["rows"][0]["raw_value"] == "none"


def test_files_in_quarantine_are_listed(api: str, served: IngestHarness) -> None:
    """I3: each file with its reason and its run, newest first; `total` counts the files beyond the limit."""
    (failed,) = get(f"{api}/runs", supplier=SUPPLIER, status="FAIL")["runs"]
    quarantine = get(f"{api}/suppliers/{SUPPLIER}/quarantine")
    (file,) = quarantine["files"]
    assert quarantine["total"] == 1
    assert (file["reason"], file["runId"], file["bytes"]) == ("DQ_TOO_MANY_BAD_ROWS", failed["runId"], len(BROKEN))
    assert file["path"] == failed["manifest"]["moved_to"]
    assert file["since"].endswith("Z")
    later = f"{paths.make_broken_path(SUPPLIER)}/later.csv"
    served.put(later, BROKEN)
    cut = get(f"{api}/suppliers/{SUPPLIER}/quarantine", limit=1)
    assert ([shown["path"] for shown in cut["files"]], cut["total"]) == ([later], 2)


TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")


def list_times(document: Any) -> list[str]:
    """Return the times in a document, at any depth."""
    if isinstance(document, dict):
        return [time for value in document.values() for time in list_times(value)]
    if isinstance(document, list):
        return [time for value in document for time in list_times(value)]
    return [document] if isinstance(document, str) and TIME.match(document) else []


def list_names(document: Any) -> set[str]:
    """Return the field names in a document, without those of quoted files."""
    if isinstance(document, list):
        return {name for value in document for name in list_names(value)}
    if not isinstance(document, dict):
        return set()
    own = {name: value for name, value in document.items() if name not in ("manifest", "rows", "before", "after")}
    return {*document, *(name for value in own.values() for name in list_names(value))}


def test_documents_have_one_format_of_times_and_names(api: str, served: IngestHarness) -> None:
    """All times end with Z, also in manifests and in the files of the tree; field names are in camelCase."""
    (run, *_) = get(f"{api}/runs", supplier=SUPPLIER)["runs"]
    paths_of_api = ["suppliers", f"suppliers/{SUPPLIER}", f"suppliers/{SUPPLIER}/moves", "runs", f"runs/{run['runId']}"]
    paths_of_api += [f"suppliers/{SUPPLIER}/quarantine", f"state/{SUPPLIER}", f"runs/{run['runId']}/bad-rows"]
    documents = [get(f"{api}/{path}") for path in paths_of_api]
    stored = [
        paths.make_run_path(run["runId"], paths.MANIFEST),
        paths.make_run_path(run["runId"], paths.STARTED),
        paths.make_ledger_path(SUPPLIER),
    ]
    times = list_times([*documents, *map(served.read_json, stored)])
    assert len(times) > 20
    assert [time for time in times if not time.endswith("Z")] == []
    reasons = {"NOT_INTEGER"}
    assert {name for name in list_names(documents) if "_" in name} <= reasons


def test_two_publications_are_compared(api: str, served: IngestHarness) -> None:
    """I10, I21: the published state with the one before it, or any two runs; the limit cuts what is shown."""
    runs = get(f"{api}/runs", supplier=SUPPLIER, status="PASS")["runs"]
    second, first = (run["runId"] for run in runs)
    comparison = get(f"{api}/state/{SUPPLIER}/diff")
    assert (comparison["before"], comparison["after"]) == (first, second)
    assert (comparison["changed"], comparison["unchanged"]) == (1, 1)
    (shown,) = comparison["shown"]
    assert (shown["change"], shown["before"]["payload"]["price"], shown["after"]["payload"]["price"]) == (
        "changed",
        1,
        2,
    )
    back = get(f"{api}/state/{SUPPLIER}/diff", **{"from": second, "to": first, "limit": 0})
    assert (back["before"], back["changed"], back["shown"]) == (second, 1, [])


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("suppliers/unknown", 404, "SUPPLIER_NOT_FOUND"),
        ("suppliers/no%20name", 422, "BAD_SUPPLIER"),
        ("suppliers/no%20name/moves", 422, "BAD_SUPPLIER"),
        ("suppliers/unknown/quarantine", 404, "SUPPLIER_NOT_FOUND"),
        ("suppliers/acme/quarantine?limit=0", 422, None),
        ("state/unknown", 404, "STATE_NOT_FOUND"),
        ("state/unknown/diff", 404, "STATE_NOT_FOUND"),
        ("state/no%20name/diff", 422, "BAD_SUPPLIER"),
        ("state/acme/diff?from=globex_20200101T000000Z_000000", 422, "OTHER_SUPPLIER"),
        ("state/acme/diff?limit=1001", 422, None),
        ("state/unknown/facts", 404, "STATE_NOT_FOUND"),
        ("runs/nothing", 404, "RUN_NOT_FOUND"),
        ("runs/acme_20200101T000000Z_000000", 404, "RUN_NOT_FOUND"),
        ("runs/acme_20200101T000000Z_000000/bad-rows", 404, "RUN_NOT_FOUND"),
        ("runs?cursor=nonsense", 422, "BAD_CURSOR"),
        ("runs?cursor=", 422, "BAD_CURSOR"),
        ("runs?limit=0", 422, None),
        ("runs?status=GOOD", 422, None),
        ("runs?supplier=%00", 422, "BAD_SUPPLIER"),
    ],
)
def test_errors_are_problem_documents(api: str, path: str, status: int, code: str | None) -> None:
    """Every error has its status and a stable code."""
    response = httpx.get(f"{api}/{path}")
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["code"] == code if code else response.json()["code"]


@pytest.mark.full
def test_tenants_have_no_access(harness: IngestHarness) -> None:
    """I23: a token that acts for a tenant gets 403; an operator has access."""
    config = {"ingest": {"root": str(harness.root), **QUICK}}
    write_config(harness.root.parent, config)
    harness.drop(ONE)
    with Up(harness.root.parent, env=WITH_TOKENS) as up:
        api = f"{up.api}/api/v1/ingest"
        for path in (
            "suppliers",
            "runs",
            f"state/{SUPPLIER}/facts",
            f"suppliers/{SUPPLIER}/quarantine",
            f"state/{SUPPLIER}/diff",
        ):
            refused = httpx.get(f"{api}/{path}", headers=token())
            assert (refused.status_code, refused.json()["code"]) == (403, "OPERATOR_ONLY")
            assert httpx.get(f"{api}/{path}").status_code == 401
        operator = token(tenant_id=None)
        until(lambda: harness.current() is not None, "it is published")
        until(lambda: "PASS" in httpx.get(f"{api}/runs", headers=operator).text, "it is recorded")
        assert httpx.get(f"{api}/state/{SUPPLIER}/facts", headers=operator).status_code == 200
        assert up.stop(signal.SIGINT) == 0
