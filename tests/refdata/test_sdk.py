"""R31: the Python client and the command line of dictionaries, on a complete Penstock."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Raw

from penstock.kernel.errors import Conflict, NotFound, PenstockError
from penstock.refdata.contract import Command, CommandItem, EventType
from penstock.refdata.sdk import Dictionaries
from tests.support.processes import Up, penstock

CONFIG = """
refdata:
  query: {reconcileEvery: PT30S}
  dictionaries:
    - {code: COUNTRY, maxDropPercent: 10, retainVersions: 2}
    - {code: RATE}
"""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    (folder / "penstock.yaml").write_text(CONFIG)
    with Up(folder) as running:
        yield running


async def test_what_is_written_is_read(up: Up) -> None:
    """R31, R21: a read sees the writes before it without a version in the call."""
    async with Dictionaries(up.api, up.query, "acme") as client:
        for number in range(30):
            version = await client.put("RATE", {"EUR": number, f"k{number}": "x"})
            assert await client.get("RATE", "EUR") == number
            assert client.versions["RATE"] == version
        assert await client.get_many("RATE", ["EUR", "k0", "none"]) == {"EUR": 29, "k0": "x"}
        assert len([key async for key, _ in client.all("RATE")]) == 31
        await client.put("RATE", {}, deletes=["EUR"])
        assert await client.get("RATE", "EUR", default=None) is None
        with pytest.raises(NotFound, match="EUR"):
            await client.get("RATE", "EUR")


async def test_versions_can_be_passed_to_another_client(up: Up) -> None:
    """R31: a client with the versions of another reads no older data; an unknown version is refused."""
    async with Dictionaries(up.api, up.query, "globex") as writer:
        await writer.replace("RATE", {"USD": 1})
        async with Dictionaries(up.api, up.query, "globex", versions=writer.versions) as reader:
            assert await reader.get("RATE", "USD") == 1
    async with Dictionaries(up.api, up.query, "globex", versions={"RATE": 99}) as other:
        with pytest.raises(Conflict, match="not yet at 99"):
            await other.get("RATE", "USD")


async def test_changes_are_streamed(up: Up) -> None:
    """R31: the stream contains the changes after the version that the client has seen."""
    async with Dictionaries(up.api, up.query, "initech") as client:
        await client.put("RATE", {"a": 1})
        feed = client.changes("RATE")
        version = await client._commit("RATE", [_delta("b")])
        client.versions["RATE"] = version - 1
        event = await anext(feed)
        assert (event["event"], event["version"], event["keys"]) == ("change", version, ["b"])
        await feed.aclose()


async def test_a_refused_write_is_an_error(up: Up) -> None:
    """R30, R31: a failed update raises an error with its reason."""
    async with Dictionaries(up.api, up.query, "acme") as client:
        await client.replace("COUNTRY", {key: {"name": key} for key in "abcd"})
        with pytest.raises(PenstockError, match="allows a drop of 10 %"):
            await client.replace("COUNTRY", {"a": {"name": "a"}})


@pytest.mark.full
def test_dictionaries_from_the_command_line(up: Up, tmp_path: Path) -> None:
    """R17, R30, R32: the commands read, wait, audit, pin and roll back, with exit codes and as JSON."""
    env = {"PENSTOCK_URL": up.api, "PENSTOCK_QUERY_URL": up.query}

    def run(*args: str, code: int = 0) -> str:
        done = penstock("dict", *args, cwd=tmp_path, env=env)
        assert done.code == code, done.err
        return done.out if code == 0 else done.err

    run("put", "t", "COUNTRY", "NO", '{"name": "Norway"}')
    run("put", "t", "COUNTRY", "SE", '{"name": "Sweden"}')
    assert run("wait", "t", "COUNTRY", "--version", "2").startswith("version 2 is served")
    assert run("get", "t", "COUNTRY", "NO") == '{"name": "Norway"}\n'
    assert '"source": "memory"' in run("get", "t", "COUNTRY", "NO", "--json")
    assert run("items", "t", "COUNTRY").count("\n") == 2
    run("put", "t", "RATE", "EUR", '{"rate": 1.10}')
    assert run("items", "t", "RATE", "--min-version", "1") == '{"key":"EUR","value":{"rate": 1.10}}\n'
    assert run("get", "t", "RATE", "EUR", "none") == '{"EUR":{"rate": 1.10}}\n'
    assert run("show", "t", "COUNTRY").startswith("version 2, 2 items")
    assert run("lag", "t", "COUNTRY").startswith("0 behind")
    assert "agrees" in run("audit", "t", "COUNTRY")
    assert "there is no item 'XX'" in run("get", "t", "COUNTRY", "XX", code=5)
    assert "is not served yet" in run("wait", "t", "COUNTRY", "--version", "9", "--timeout", "0.2", code=124)
    assert "not yet at 9" in run("get", "t", "COUNTRY", "NO", "--min-version", "9", code=6)
    (tmp_path / "few.json").write_text('{"NO": {"name": "Norge"}}')
    assert "ROW_DROP" in run("import", "t", "COUNTRY", "few.json", code=1)
    run("import", "t", "COUNTRY", "few.json", "--allow-drop")
    assert run("retained", "t", "COUNTRY").splitlines()[1].startswith("2 ")
    assert "is committed as version 4" in run("rollback", "t", "COUNTRY", "2")
    assert "Sweden" in run("get", "t", "COUNTRY", "SE", "--min-version", "4")
    assert run("retain", "t", "COUNTRY") == "version 4 is retained\n"
    assert "readers get version 2" in run("pin", "t", "COUNTRY", "2")
    assert "is unpinned" in run("unpin", "t", "COUNTRY")
    assert "not retained" in run("pin", "t", "COUNTRY", "99", code=5)


def _delta(key: str) -> Command:
    return Command(dict_code="RATE", event_type=EventType.DELTA, items=[CommandItem(key, payload=Raw(b"1"))])
