"""The API of ingest in a running `penstock up`: what every route answers, and to whom."""

import json
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
    """A database the module's server has to itself."""
    with module_database() as url:
        yield url


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> IngestHarness:
    """Serve a harness after two publications and a failure."""
    return IngestHarness(tmp_path_factory.mktemp("served") / "root", {**KEYED, "keep_raw": True})


@pytest.fixture(scope="module")
def api(served: IngestHarness, server_database: str) -> Iterator[str]:
    """The API of a running `penstock up`, as far as it is ingest's."""
    config = {"database": {"url": server_database}, "ingest": {"root": str(served.root), **QUICK}}
    with open_ingest_workspace(Settings.model_validate(config), uses_database=True) as place:
        for content in (ONE, BROKEN, TWO):
            served.drop(content)
            place.run(SUPPLIER, RunHooks(), waits=False)
    folder = served.root.parent
    write_config(folder, config)
    with Up(folder) as up:
        yield f"{up.api}/api/v1/ingest"


def get(url: str, **params: Any) -> Json:
    return answered(httpx.get(url, params=params))


def test_a_dropped_file_is_published_by_itself(api: str, served: IngestHarness) -> None:
    """I23: `penstock up` watches; what came of it is under every address of the API."""
    served.configure(KEYED, "globex")
    served.drop(ONE, supplier="globex")
    until(lambda: bool(get(f"{api}/runs", supplier="globex", status="PASS")["runs"]), "it is published")
    (run,) = get(f"{api}/runs", supplier="globex")["runs"]
    assert run["runId"] == served.current("globex")
    whole = get(f"{api}/runs/{run['runId']}")
    assert whole["manifest"] == served.read_json(paths.run(run["runId"], paths.MANIFEST))
    assert [(one["from"], one["to"]) for one in whole["history"]] == [(None, "RUNNING"), ("RUNNING", "PASS")]
    assert [(move["fileName"], move["reason"]) for move in whole["moves"]] == [("price.csv", "published")]
    assert get(f"{api}/suppliers/globex/moves")["moves"] == whole["moves"]
    standing = {one["supplier"]: one for one in get(f"{api}/suppliers")["suppliers"]}["globex"]
    assert (standing["runId"], standing["facts"], standing["fence"]) == (run["runId"], 2, 1)
    assert get(f"{api}/suppliers/globex")["alerts"] == []


def test_a_state_is_read_whole(api: str, served: IngestHarness) -> None:
    """I14, §17: NDJSON whose sha256 is the pointer's and the ETag; the headers say which state it is."""
    state = get(f"{api}/state/{SUPPLIER}")
    assert (state["runId"], state["fence"], state["manifest"]["status"]) == (served.current(), 2, "PASS")
    facts = httpx.get(f"{api}/state/{SUPPLIER}/facts")
    assert facts.headers["content-type"] == "application/x-ndjson"
    assert sha256(facts.content).hexdigest() == state["sha256"]
    assert facts.headers["etag"] == f'"{state["sha256"]}"'
    assert (facts.headers["x-run-id"], facts.headers["x-fence"]) == (state["runId"], "2")
    assert [json.loads(line) for line in facts.text.splitlines()] == served.facts()


def test_runs_are_paged(api: str) -> None:
    """The latest first; page by page nothing is missed and nothing comes twice."""
    whole = get(f"{api}/runs", supplier=SUPPLIER)
    assert ([one["status"] for one in whole["runs"]], whole["next"]) == (["PASS", "FAIL", "PASS"], None)
    paged: list[Json] = []
    cursor: Json = {}
    for _ in whole["runs"]:
        page = get(f"{api}/runs", supplier=SUPPLIER, limit=1, **cursor)
        paged += page["runs"]
        cursor = {"cursor": page["next"]}
    assert paged == whole["runs"]
    assert cursor == {"cursor": None}
    failed = get(f"{api}/runs", status="FAIL")["runs"]
    bad = get(f"{api}/runs/{failed[0]['runId']}/bad-rows", limit=1)
    assert (bad["badRows"], bad["reasons"], len(bad["rows"])) == (2, {"NOT_INTEGER": 2}, 1)
    assert bad["rows"][0]["raw_value"] == "none"


def test_files_in_quarantine_are_listed(api: str, served: IngestHarness) -> None:
    """I3: each file with its reason and its run, newest first; `total` counts the files beyond the limit."""
    (failed,) = get(f"{api}/runs", supplier=SUPPLIER, status="FAIL")["runs"]
    found = get(f"{api}/suppliers/{SUPPLIER}/quarantine")
    (file,) = found["files"]
    assert found["total"] == 1
    assert (file["reason"], file["runId"], file["bytes"]) == ("DQ_TOO_MANY_BAD_ROWS", failed["runId"], len(BROKEN))
    assert file["path"] == failed["manifest"]["moved_to"]
    assert file["since"].endswith("Z")
    later = f"{paths.broken(SUPPLIER)}/later.csv"
    served.put(later, BROKEN)
    cut = get(f"{api}/suppliers/{SUPPLIER}/quarantine", limit=1)
    assert ([shown["path"] for shown in cut["files"]], cut["total"]) == ([later], 2)


def test_two_publications_are_compared(api: str, served: IngestHarness) -> None:
    """I10, I21: the published state with the one before it, or any two runs; the limit cuts what is shown."""
    runs = get(f"{api}/runs", supplier=SUPPLIER, status="PASS")["runs"]
    second, first = (run["runId"] for run in runs)
    found = get(f"{api}/state/{SUPPLIER}/diff")
    assert (found["before"], found["after"], found["changed"], found["unchanged"]) == (first, second, 1, 1)
    (shown,) = found["shown"]
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
        ("suppliers/nobody", 404, "SUPPLIER_NOT_FOUND"),
        ("suppliers/no%20name", 422, "BAD_SUPPLIER"),
        ("suppliers/no%20name/moves", 422, "BAD_SUPPLIER"),
        ("suppliers/nobody/quarantine", 404, "SUPPLIER_NOT_FOUND"),
        ("suppliers/acme/quarantine?limit=0", 422, None),
        ("state/nobody", 404, "STATE_NOT_FOUND"),
        ("state/nobody/diff", 404, "STATE_NOT_FOUND"),
        ("state/no%20name/diff", 422, "BAD_SUPPLIER"),
        ("state/acme/diff?from=globex_20200101T000000Z_000000", 422, "OTHER_SUPPLIER"),
        ("state/acme/diff?limit=1001", 422, None),
        ("state/nobody/facts", 404, "STATE_NOT_FOUND"),
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
def test_mistakes_are_problems(api: str, path: str, status: int, code: str | None) -> None:
    """Each with its status and a code that stays."""
    answer = httpx.get(f"{api}/{path}")
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == code if code else answer.json()["code"]


@pytest.mark.full
def test_suppliers_belong_to_no_tenant(harness: IngestHarness) -> None:
    """I23: on an embedded database, with tokens: one that acts for a tenant sees nothing of suppliers."""
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
        ours = token(tenant_id=None)
        until(lambda: harness.current() is not None, "it is published")
        until(lambda: "PASS" in httpx.get(f"{api}/runs", headers=ours).text, "it is recorded")
        assert httpx.get(f"{api}/state/{SUPPLIER}/facts", headers=ours).status_code == 200
        assert up.stop(signal.SIGINT) == 0
