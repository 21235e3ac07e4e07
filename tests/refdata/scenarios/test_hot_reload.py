"""R1: dictionaries change while all roles run; an invalid configuration changes nothing and is logged."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.refdata.definitions_in_process import (
    COUNTRY,
    CURRENCY,
    NOK,
    TENANTS,
    redefined,
)
from tests.refdata.harness import upsert
from tests.support.http import commit_update
from tests.support.processes import Up
from tests.support.settings import write_config
from tests.support.types import Json
from tests.support.wait import until


class HotReloadHarness:
    """A running Penstock, its configuration file and its log."""

    def __init__(self, folder: Path, url: str, *known: Json, **sections: Any) -> None:
        self.file, self.url = folder / "penstock.yaml", url
        self.write(*known, **sections)
        self.up = Up(folder)

    def write(self, *known: Json, **sections: Any) -> None:
        """Replace the configuration file atomically, as an editor does."""
        document = {"database": {"url": self.url}, "refdata": {"dictionaries": known}, **sections}
        self.replace(json.dumps(document, indent=1))

    def replace(self, text: str) -> None:
        write_config(self.file.parent, text)

    def submit(self, code: str, *items: Json, tenant: str = "acme") -> httpx.Response:
        body = {"dictCode": code, "eventType": "DELTA", "items": items}
        return commit_update(f"{self.up.api}/v1/tenants/{tenant}/updates", body)

    def history(self, code: str, tenant: str = "acme") -> list[Json]:
        """Return the versions of a dictionary, latest first."""
        found: list[Json] = httpx.get(f"{self.up.api}/v1/tenants/{tenant}/history/{code}").json()["versions"]
        return found

    def sources(self, code: str, tenant: str = "acme") -> list[str]:
        """Return the source of each version, oldest first."""
        return [version["source"] for version in reversed(self.history(code, tenant))]

    def logged(self, event: str) -> list[Json]:
        """Return the log entries of *event*; the last line may be incomplete."""
        lines = self.up.log_file.read_text().split("\n")[:-1]
        return [entry for line in lines if line.startswith("{") and (entry := json.loads(line))["event"] == event]

    def until_logged(self, event: str, times: int = 1) -> Json:
        """Wait for *count* log entries of an event, and return the last one."""
        until(lambda: len(self.logged(event)) >= times, f"{times} × {event}")
        return self.logged(event)[times - 1]


@pytest.fixture
def program(schemas: str, tmp_path: Path) -> Iterator[HotReloadHarness]:
    program = HotReloadHarness(tmp_path, schemas, CURRENCY)
    with program.up:
        yield program


def test_a_new_dictionary_works_when_the_file_changes(program: HotReloadHarness) -> None:
    """R1: a new dictionary needs only configuration, without restart or signal; the others continue."""
    assert program.submit("FRESH", upsert("a", 1)).status_code == 404
    program.write(CURRENCY, {"code": "FRESH"}, COUNTRY)
    until(lambda: program.submit("FRESH", upsert("a", 1)).status_code == 200, "FRESH to be accepted")
    assert program.submit("COUNTRY", upsert("NO", {"name": "Norway"})).json()["committedVersion"] == 1
    assert program.submit("CURRENCY", NOK).json()["committedVersion"] == 1
    entry = program.until_logged("configuration_reloaded")
    assert (entry["dictionaries"], entry["redefined"]) == (["CURRENCY", "FRESH", "COUNTRY"], 0)


@pytest.mark.full
def test_a_dictionary_that_is_taken_out_takes_no_more(program: HotReloadHarness) -> None:
    """R1: a removed dictionary is unknown, a disabled one is reported as such, and a tenant must be listed."""
    program.write(COUNTRY, {**CURRENCY, "enabled": False})
    until(lambda: program.submit("CURRENCY", NOK).status_code == 422, "CURRENCY to be disabled")
    assert program.submit("CURRENCY", NOK).json()["code"] == "DICTIONARY_DISABLED"
    program.write(COUNTRY)
    until(lambda: program.submit("CURRENCY", NOK).status_code == 404, "CURRENCY to be gone")
    document = {"database": {"url": program.url}, "refdata": {"dictionaries": [CURRENCY], "tenants": ["globex"]}}
    program.replace(json.dumps(document))
    until(lambda: program.submit("CURRENCY", NOK, tenant="globex").status_code == 200, "CURRENCY to be back")
    assert program.submit("CURRENCY", NOK).json()["code"] == "UNKNOWN_TENANT"


@pytest.mark.full
def test_a_signal_makes_it_look_again(program: HotReloadHarness) -> None:
    """R1: SIGHUP reloads a change that size, time and inode of the file do not show."""
    program.write(CURRENCY, {"code": "FIRST"})
    until(lambda: program.submit("FIRST").status_code == 200, "FIRST to be accepted")
    before = program.file.stat()
    with program.file.open("r+b") as file:
        text = file.read().replace(b"FIRST", b"OTHER")
        file.seek(0)
        file.write(text)
    os.utime(program.file, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.kill(program.up.pid, signal.SIGHUP)
    until(lambda: program.submit("OTHER").status_code == 200, "OTHER to be accepted")
    assert program.submit("FIRST").status_code == 404


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("refdata: {dictionaries: [{code: A}, {code: A}]}", "duplicate dictionary: A"),
        ("refdata:\n  dictionaris: []\n", "2:3: refdata.dictionaris: unknown key"),
        ("refdata: [", "not valid YAML"),
        ("refdata: {dictionaries: [{code: X, loadSql: select 1}]}", "loadSql"),
    ],
)
def test_a_wrong_configuration_changes_nothing(program: HotReloadHarness, text: str, problem: str) -> None:
    """R1: the previous configuration stays active, and the log has an error with the place; a valid one is loaded."""
    program.replace(text)
    refused = program.until_logged("configuration_refused")
    assert refused["level"] == "error"
    assert problem in refused["error"]
    assert program.submit("CURRENCY", NOK).json()["committedVersion"] == 1
    os.kill(program.up.pid, signal.SIGHUP)
    program.until_logged("configuration_refused", 2)
    assert program.submit("CURRENCY", NOK).json()["committedVersion"] == 2
    program.write(CURRENCY, {"code": "FRESH"})
    until(lambda: program.submit("FRESH").status_code == 200, "FRESH to be accepted")
    assert program.sources("CURRENCY") == ["REST", "REST"]


@pytest.mark.full
def test_statements_postgresql_would_not_take_change_nothing(program: HotReloadHarness) -> None:
    """R1: SQL is checked before it is loaded; a rejected configuration makes no new version."""
    assert program.submit("CURRENCY", NOK).status_code == 200
    broken = {**CURRENCY, "loadSql": "select k, v from no_such_table where tenant_id = :tenantId"}
    program.write(broken, {"code": "FRESH"})
    refused = program.until_logged("configuration_refused")
    assert "no_such_table" in str(refused["error"])
    assert program.submit("CURRENCY", NOK).json()["committedVersion"] == 2
    assert program.submit("FRESH").status_code == 404


@pytest.mark.full
def test_what_is_not_enabled_need_not_work(program: HotReloadHarness) -> None:
    """R1: a dictionary without tables can be in the file while it is disabled, and does not block others."""
    later = {"code": "LATER", "enabled": False, "loadSql": "select k, v from not_yet where tenant_id = :tenantId"}
    program.write(CURRENCY, later, {"code": "FRESH"})
    until(lambda: bool(program.logged("configuration_reloaded") or program.logged("configuration_refused")), "a reload")
    assert program.logged("configuration_refused") == []
    assert program.submit("FRESH").status_code == 200


@pytest.mark.full
def test_a_file_that_is_gone_changes_nothing(program: HotReloadHarness) -> None:
    """R1: a removed file is an error in the log; when it exists again it is loaded."""
    program.file.unlink()
    assert program.until_logged("configuration_refused")["code"] == "CONFIG_UNREADABLE"
    assert program.submit("CURRENCY", NOK).status_code == 200
    program.write(CURRENCY, {"code": "FRESH"})
    until(lambda: program.submit("FRESH").status_code == 200, "FRESH to be accepted")


def test_another_way_to_read_is_another_version_for_every_tenant(program: HotReloadHarness) -> None:
    """R1: a changed loadSql makes one new version of that dictionary for each tenant with it, and of no other."""
    for tenant in TENANTS:
        assert program.submit("CURRENCY", NOK, tenant=tenant).json()["committedVersion"] == 1
    program.write(CURRENCY, COUNTRY)
    program.until_logged("configuration_reloaded")
    program.submit("COUNTRY", upsert("NO", {"name": "Norway"}))
    program.write(redefined(CURRENCY), COUNTRY)
    assert program.until_logged("configuration_reloaded", 2)["redefined"] == 1
    for tenant in TENANTS:
        assert program.sources("CURRENCY", tenant) == ["REST", "CONFIG"]
        assert program.submit("CURRENCY", NOK, tenant=tenant).json()["committedVersion"] == 3
    assert program.sources("COUNTRY") == ["REST"]
    (_, bumped, _) = program.history("CURRENCY")
    assert (bumped["version"], bumped["eventType"], bumped["keys"]) == (2, "CONFIG", None)


@pytest.mark.full
def test_nothing_but_the_way_to_read_makes_a_version(program: HotReloadHarness) -> None:
    """R1: changes of other statements, of reloadOnEvent and of the order, SIGHUP and restarts make no new version."""
    program.submit("CURRENCY", NOK)
    other = {
        **CURRENCY,
        "apply": {**CURRENCY["apply"], "upsertSql": CURRENCY["apply"]["upsertSql"] + " "},
        "driftCheckSql": "select 1 where :tenantId <> ''",
        "reloadOnEvent": "DELTA",
    }
    for number, known in enumerate([[other], [COUNTRY, other], [{**other, "enabled": False}], [], [CURRENCY]], start=1):
        program.write(*known)
        assert program.until_logged("configuration_reloaded", number)["redefined"] == 0
    os.kill(program.up.pid, signal.SIGHUP)
    program.until_logged("configuration_reloaded", 6)
    assert program.sources("CURRENCY") == ["REST"]
    assert program.up.stop() == 0
    again = HotReloadHarness(program.file.parent, program.url, CURRENCY)
    with again.up:
        assert again.sources("CURRENCY") == ["REST"]


@pytest.mark.full
def test_a_change_while_stopped_makes_a_version(program: HotReloadHarness) -> None:
    """R1: a loadSql that changed between stop and start makes a new version at the start."""
    program.submit("CURRENCY", NOK)
    assert program.up.stop() == 0
    again = HotReloadHarness(program.file.parent, program.url, redefined(CURRENCY))
    with again.up:
        assert again.sources("CURRENCY") == ["REST", "CONFIG"]


@pytest.mark.full
def test_two_processes_bump_once(schemas: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """R1: any number of processes that load the new loadSql at any time make one version."""
    programs = [HotReloadHarness(tmp_path_factory.mktemp("up"), schemas, CURRENCY) for _ in range(2)]
    with programs[0].up, programs[1].up:
        for tenant in TENANTS:
            assert programs[0].submit("CURRENCY", NOK, tenant=tenant).status_code == 200
        for round_, known in enumerate([redefined(CURRENCY), CURRENCY, redefined(CURRENCY)], start=1):
            for program in programs:
                program.write(known)
            numbers = [program.until_logged("configuration_reloaded", round_)["redefined"] for program in programs]
            assert sorted(numbers) == [0, 1]
        for tenant in TENANTS:
            assert programs[1].sources("CURRENCY", tenant) == ["REST", "CONFIG", "CONFIG", "CONFIG"]


@pytest.mark.full
def test_a_setting_that_needs_a_restart_is_logged(program: HotReloadHarness) -> None:
    """R1: only dictionaries and tenants are reloaded; a change of another setting is logged once."""
    program.write(CURRENCY, {"code": "FRESH"}, telemetry={"journal_retention": "P10D"})
    assert program.until_logged("restart_needed")["level"] == "warning"
    until(lambda: program.submit("FRESH").status_code == 200, "FRESH to be accepted")
    program.write(CURRENCY, telemetry={"journal_retention": "P10D"})
    program.until_logged("configuration_reloaded", 2)
    assert len(program.logged("restart_needed")) == 1
