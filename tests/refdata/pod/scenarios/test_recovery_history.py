"""R20, R24: the loads after a change, and after a reset of the history of the primary."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from penstock.refdata.dictionaries.reader import DictionarySnapshot, Rows
from tests.refdata.harness import RefdataHarness, delete, opened, refdata_settings, upsert
from tests.refdata.pod.harness import PodHarness, running_pod
from tests.services.postgres_proxy import PostgresProxy
from tests.support.types import Json
from tests.support.wait import becomes

OFTEN = {"reconcileEvery": "PT0.2S", "auditEvery": None}
TABLES = ("dictionary_meta", "outbox_event", "dictionary_item", "processed_event", "update_request", "mdm_country")
CODES = ["LOOSE", "COUNTRY"]


@pytest.fixture
async def pod(proxy: PostgresProxy, tmp_path: Path) -> AsyncIterator[PodHarness]:
    async with running_pod(refdata_settings(proxy.url, query=OFTEN), tmp_path) as pod:
        yield pod


async def put(writer: RefdataHarness, code: str, **items: str) -> int:
    await writer.send(code, *(upsert(key, {"name": name}) for key, name in items.items()))
    await writer.apply()
    return await writer.version(code)


async def back_up(writer: RefdataHarness) -> None:
    for table in TABLES:
        await writer.db.execute(f"CREATE TABLE backup_{table} AS SELECT * FROM {table}")


async def restore(writer: RefdataHarness) -> None:
    """Restore the tables in one transaction, like a backup."""
    async with writer.db.transaction() as tx:
        for table in TABLES:
            await tx.execute(f"DELETE FROM {table}")
            await tx.execute(f"INSERT INTO {table} SELECT * FROM backup_{table}")


async def names(pod: PodHarness, code: str) -> tuple[int, dict[str, str]]:
    """Return the version and the names of the items of one response."""
    found = await pod.get(f"{code}/all")
    assert found.status == 200
    return found.version, {item["key"]: item["value"]["name"] for item in found.json["items"]}


async def shows(pod: PodHarness, code: str, version: int, **items: str) -> None:
    async def is_so() -> bool:
        return await names(pod, code) == (version, items)

    await becomes(is_so, f"version {version} with {items}", within=15)


async def samples(pod: PodHarness, name: str, code: str) -> dict[str, float]:
    """Return the values of a metric of one dictionary by kind."""
    async with pod.session.get(f"{pod.address}/actuator/prometheus") as response:
        families = list(text_string_to_metric_families(await response.text()))
    found = [sample for family in families for sample in family.samples if sample.name == name]
    return {sample.labels.get("kind", ""): sample.value for sample in found if sample.labels.get("dict_code") == code}


async def loads(pod: PodHarness, code: str) -> dict[str, float]:
    return await samples(pod, "cache_reload_duration_seconds_count", code)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("later", [(), ("b",), ("b", "c")], ids=["lower", "the same", "higher"])
async def test_a_reset_of_the_history_is_followed(
    proxy: PostgresProxy, writer: RefdataHarness, pod: PodHarness, code: str, later: tuple[str, ...]
) -> None:
    """R24: after a restore, with or without later writes, the primary is followed and the reset is logged."""
    await put(writer, code, a="kept")
    await back_up(writer)
    lost = await put(writer, code, a="lost", x="lost")
    await shows(pod, code, lost, a="lost", x="lost")
    with capture_logs() as logs:
        await proxy.shut()
        await restore(writer)
        for key in later:
            await put(writer, code, **{key: "later"})
        await proxy.open()
        version = 1 + len(later)
        await shows(pod, code, version, a="kept", **dict.fromkeys(later, "later"))
    resets = [log for log in logs if log["event"] == "history_reset_detected"]
    about = ("acme", code, version, lost)
    assert [(entry["tenantId"], entry["dictCode"], entry["version"], entry["previousVersion"]) for entry in resets] == [
        about
    ]
    assert resets[0]["log_level"] == "error"
    assert await samples(pod, "penstock_refdata_history_resets_total", code) == {"": 1}
    refused = await pod.get(f"{code}/items/a", min_version=version + 1)
    assert (refused.status, refused.json["code"]) == (409, "VERSION_NOT_COMMITTED")
    after = await put(writer, code, d="after")
    await shows(pod, code, after, a="kept", d="after", **dict.fromkeys(later, "later"))
    assert len([log for log in logs if log["event"] == "history_reset_detected"]) == 1


@pytest.mark.parametrize("code", CODES)
async def test_a_dictionary_missing_in_a_backup_is_emptied(writer: RefdataHarness, pod: PodHarness, code: str) -> None:
    """R24: restored to a time before its first version a dictionary is empty, and new versions are served."""
    await back_up(writer)
    await shows(pod, code, await put(writer, code, a="lost"), a="lost")
    with capture_logs() as logs:
        await restore(writer)
        await shows(pod, code, 0)
    assert [log["dictCode"] for log in logs if log["event"] == "history_reset_detected"] == [code]
    await shows(pod, code, await put(writer, code, b="new"), b="new")


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the keys of each lookup in the primary."""
    seen: list[list[str]] = []
    only = DictionarySnapshot.read_keys

    async def noted(snapshot: DictionarySnapshot, keys: list[str]) -> Rows | None:
        seen.append(keys)
        return await only(snapshot, keys)

    monkeypatch.setattr(DictionarySnapshot, "read_keys", noted)
    return seen


async def test_only_changed_keys_are_loaded(
    writer: RefdataHarness, pod: PodHarness, looked_up: list[list[str]]
) -> None:
    """R20, R29: a change of a few keys looks up only these keys."""
    await shows(pod, "LOOSE", await put(writer, "LOOSE", **{f"k{n}": "x" for n in range(50)}), **_many(50, "x"))
    before = await loads(pod, "LOOSE")
    looked_up.clear()
    await writer.send("LOOSE", upsert("k1", {"name": "y"}), delete("k2"), upsert("new", {"name": "z"}))
    await writer.apply()
    left = {key: name for key, name in _many(50, "x").items() if key != "k2"}
    await shows(pod, "LOOSE", 2, **{**left, "k1": "y", "new": "z"})
    assert looked_up == [["k1", "k2", "new"]]
    assert await loads(pod, "LOOSE") == {**before, "delta": before.get("delta", 0) + 1}


@pytest.mark.parametrize(
    ("code", "many", "spoil", "kind"),
    [
        ("LOOSE", 100, None, "delta"),
        ("LOOSE", 101, None, "full"),
        ("LOOSE", 2, "DELETE FROM outbox_event WHERE version = 2", "full"),
        ("COUNTRY", 2, None, "full"),
    ],
    ids=["as many keys as are announced", "more than are announced", "a gap in the history", "reloadOnEvent FULL"],
)
async def test_unknown_changes_cause_a_full_load(
    proxy: PostgresProxy, writer: RefdataHarness, pod: PodHarness, code: str, many: int, spoil: str | None, kind: str
) -> None:
    """R20: a delta needs the keys of every commit, and `reloadOnEvent: DELTA`."""
    await shows(pod, code, await put(writer, code, a="1"), a="1")
    before = await loads(pod, code)
    await proxy.shut()
    await put(writer, code, a="2")
    await put(writer, code, **_many(many, "3"))
    if spoil:
        await writer.db.execute(spoil)
    await proxy.open()
    await shows(pod, code, 3, a="2", **_many(many, "3"))
    after = await loads(pod, code)
    assert {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)} == {
        kind: 1
    }


def _many(count: int, name: str) -> dict[str, str]:
    return {f"k{number}": name for number in range(count)}


SPELT: list[tuple[str, str, Callable[[str], str]]] = [
    ("bigint", ":key::bigint", lambda key: str(int(key))),
    ("numeric(10, 2)", ":key::numeric", lambda key: f"{float(key):.2f}"),
    ("uuid", ":key::uuid", str.lower),
    ("text", "upper(:key)", str.upper),
    ("char(6)", ":key", str.strip),
]
KEYS = {"bigint": ("007", "8"), "numeric(10, 2)": ("1", "2.00"), "text": ("no", "SE"), "char(6)": ("no", "xxxxxx")}
UUIDS = ("0AF76519-16CD-43DD-8448-EB211C80319C", "0af76519-16cd-43dd-8448-eb211c80319d")


@pytest.mark.parametrize(("kind", "key", "spelt"), SPELT, ids=[kind for kind, _, _ in SPELT])
async def test_tables_may_spell_keys_differently(
    database_url: str, tmp_path: Path, kind: str, key: str, spelt: Callable[[str], str]
) -> None:
    """R20: if the table spells keys differently than commands, pods have the keys of the table."""
    settings = refdata_settings(database_url, dictionaries=[_own(kind, key)], query=OFTEN)
    async with opened(settings) as writer:
        await writer.db.execute(f"CREATE TABLE own (tenant_id text, k {kind}, v jsonb, PRIMARY KEY (tenant_id, k))")
        async with running_pod(settings, tmp_path) as pod:
            first, second = KEYS.get(kind, UUIDS)
            await shows(
                pod,
                "OWN",
                await put(writer, "OWN", **{first: "1", second: "1"}),
                **{spelt(first): "1", spelt(second): "1"},
            )
            await shows(pod, "OWN", await put(writer, "OWN", **{first: "2"}), **{spelt(first): "2", spelt(second): "1"})
            await writer.send("OWN", delete(first))
            await writer.apply()
            await shows(pod, "OWN", 3, **{spelt(second): "1"})
            found = await pod.get(f"OWN/items/{spelt(second)}", min_version=3)
            assert (found.status, found.json) == (200, {"name": "1"})


def _own(kind: str, key: str) -> Json:
    apply: dict[str, Any] = {
        "upsertSql": f"insert into own values (:tenantId, {key}, :payload) on conflict (tenant_id, k) "
        "do update set v = excluded.v",
        "deleteSql": f"delete from own where tenant_id = :tenantId and k = {key}",
        "snapshotReplaceSql": "select :tenantId, :snapshotJson::jsonb",
    }
    return {"code": "OWN", "loadSql": "select k, v from own where tenant_id = :tenantId", "apply": apply}
