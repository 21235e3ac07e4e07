"""`penstock dict` as a user types it, against a running `penstock up`."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from tests.refdata.harness import DOCUMENT, create_schemas, dictionaries
from tests.services.postgres import module_database
from tests.support.processes import Result, Up, penstock_here
from tests.support.settings import write_config

WRONG_DIGITS = '{"name": "Krone", "digits": 9}'


class DictCli:
    """`penstock dict` in a folder, asked of one server; each test has a tenant of its own."""

    def __init__(self, up: Up, folder: Path) -> None:
        self.up = up
        self.folder = folder
        self.tenant = f"t{uuid4().hex[:8]}"

    def run(self, *args: str | bytes, given: bytes = b"") -> Result:
        return penstock_here("dict", *args, "--url", self.up.api, cwd=self.folder, given=given)

    def json(self, *args: str, given: bytes = b"") -> Any:
        done = self.run(*args, "--json", given=given)
        assert done.code == 0, done.err
        return json.loads(done.out)

    def put(self, *args: str | bytes, code: str = "LOOSE", given: bytes = b"") -> Result:
        return self.run("put", self.tenant, code, *args, given=given)

    def load(self, name: str, content: bytes, *args: str, code: str = "LOOSE") -> Result:
        """Import a file of that content."""
        (self.folder / name).write_bytes(content)
        return self.run("import", self.tenant, code, name, *args)

    def versions(self, code: str = "LOOSE") -> list[Any]:
        found: list[Any] = self.json("history", self.tenant, code)["versions"]
        return found

    def items(self, url: str, code: str = "LOOSE") -> dict[str, Any]:
        """What is in the table, past the command line."""
        return asyncio.run(_items(url, self.tenant, code))


async def _items(url: str, tenant: str, code: str) -> dict[str, Any]:
    connection = await asyncpg.connect(url)
    try:
        query = "SELECT item_key, payload FROM dictionary_item WHERE tenant_id = $1 AND dict_code = $2 AND NOT deleted"
        return {key: json.loads(payload) for key, payload in await connection.fetch(query, tenant, code)}
    finally:
        await connection.close()


@pytest.fixture(scope="module")
def server_database(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database the module's server has to itself, with the tables of the document's dictionaries."""
    with module_database() as url:
        asyncio.run(create_schemas(url))
        yield url


@pytest.fixture(scope="module")
def server(server_database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("server")
    known = [*dictionaries(DOCUMENT), {"code": "LOOSE"}, {"code": "READ", "loadSql": "select 'a' k, :tenantId v"}]
    config = {"database": {"url": server_database}, "refdata": {"dictionaries": known}}
    write_config(folder, config)
    with Up(folder) as up:
        yield up


@pytest.fixture
def cli(server: Up, tmp_path: Path) -> DictCli:
    return DictCli(server, tmp_path)


def test_put_prints_the_version(cli: DictCli, server_database: str) -> None:
    """R6: the item is committed when the command returns, under the version it prints."""
    first = cli.put("NO", '{"name": "Norway"}')
    assert (first.code, first.err) == (0, "")
    assert first.out.startswith("committed as version 1  (event ")
    document = cli.json("put", cli.tenant, "LOOSE", "SE", '"Sweden"')
    assert (document["status"], document["committedVersion"]) == ("COMMITTED", 2)
    assert UUID(document["eventId"])
    assert cli.items(server_database) == {"NO": {"name": "Norway"}, "SE": "Sweden"}


def test_put_reads_standard_input_and_delete_deletes(cli: DictCli, server_database: str) -> None:
    """R6: `-` reads the payload from standard input; `dict delete` deletes the item."""
    assert cli.put("k", "-", given=b'{"x": [1, 2]}\n').code == 0
    assert cli.items(server_database) == {"k": {"x": [1, 2]}}
    assert cli.run("delete", cli.tenant, "LOOSE", "k").out.startswith("committed as version 2")
    assert cli.items(server_database) == {}


def test_a_repeated_put_counts_once(cli: DictCli) -> None:
    """R8: the same --event-id gives the same answer; with another payload it is a conflict."""
    event_id = str(uuid4())
    first = cli.put("k", "1", "--event-id", event_id)
    again = cli.put("k", "1", "--event-id", event_id)
    assert first == again
    other = cli.put("k", "2", "--event-id", event_id)
    assert (other.code, other.out) == (6, "")
    assert "was used for another command" in other.err
    assert len(cli.versions()) == 1


def test_put_without_waiting(cli: DictCli) -> None:
    """R6: --no-wait prints the id at once; `dict updates` shows the end."""
    document = cli.json("put", cli.tenant, "LOOSE", "k", "1", "--no-wait")
    assert document["status"] in ("PENDING", "COMMITTED")  # it may be quicker than the question
    cli.put("k", "2")  # behind it: when this one is committed, so is that
    done = cli.run("updates", cli.tenant, document["eventId"])
    assert (done.code, done.out) == (0, f"committed as version 1  (event {document['eventId']})\n")


@pytest.mark.parametrize("args", [["k"], ["k", "{"], ["k", ""], ["k", "null"], ["", "1"]])
def test_a_put_that_makes_no_sense_is_refused(cli: DictCli, args: list[str]) -> None:
    """R8: exit code 2, a sentence, and no version."""
    done = cli.put(*args)
    assert (done.code, done.out) == (2, "")
    assert "error: " in done.err
    assert "mistake in Penstock" not in done.err
    assert cli.versions() == []


def test_an_unknown_dictionary_is_an_error(cli: DictCli) -> None:
    """R2: an unknown dictionary is exit code 5, one that is read-only 2, each with what to do."""
    unknown = cli.put("k", "1", code="NOPE")
    assert (unknown.code, unknown.err.count("hint: ")) == (5, 1)
    assert cli.run("history", cli.tenant, "NOPE").code == 5
    assert cli.run("updates", cli.tenant, str(uuid4())).code == 5
    read_only = cli.run("put", cli.tenant, "READ", "k", "1", "--json")
    assert (read_only.code, json.loads(read_only.err)["error"]["code"]) == (2, "DICTIONARY_READ_ONLY")


def test_a_failed_update_tells_why(cli: DictCli) -> None:
    """R7: what PostgreSQL refuses, and a stale revision, fail with the reason; `dict updates` lists them."""
    refused = cli.run("put", cli.tenant, "CURRENCY", "NOK", WRONG_DIGITS, "--json")
    assert (refused.code != 0, refused.out) == (True, "")
    error = json.loads(refused.err)["error"]
    assert error["code"] == "SQL_ERROR"
    assert "mdm_currency_digits_check" in error["message"]
    assert cli.put("k", "1", "--revision", "5").code == 0
    stale = cli.put("k", "2", "--revision", "4")
    assert "sourceRevision 4 is lower than 5" in stale.err
    shown = cli.run("updates", cli.tenant, error["eventId"])
    assert (shown.code, shown.out.startswith("failed: SQL_ERROR: ")) == (0, True)
    listed = cli.json("updates", cli.tenant)
    assert [update["errorCode"] for update in listed["updates"]] == ["STALE_REVISION", "SQL_ERROR"]
    only = cli.json("updates", cli.tenant, "--dict", "CURRENCY")
    assert [update["eventId"] for update in only["updates"]] == [error["eventId"]]


def test_a_failed_update_is_work_that_failed(cli: DictCli) -> None:
    """R7: exit code 1, however quickly it is known."""
    assert cli.put("NOK", WRONG_DIGITS, code="CURRENCY").code == 1


def test_dictionaries_are_listed(cli: DictCli) -> None:
    """R2: every dictionary of a tenant with its last committed version; 0 before the first commit."""
    cli.put("a", "1")
    cli.put("a", "2")
    listed = {dictionary["dictCode"]: dictionary for dictionary in cli.json("ls", cli.tenant)["dictionaries"]}
    assert {"LOOSE", "READ", "CURRENCY"} <= set(listed)
    assert (listed["LOOSE"]["version"], listed["LOOSE"]["committedAt"][-1]) == (2, "Z")
    assert (listed["READ"]["version"], listed["READ"]["committedAt"], listed["READ"]["pinnedVersion"]) == (
        0,
        None,
        None,
    )
    head, *rows = cli.run("ls", cli.tenant).out.splitlines()
    assert head.split() == ["dict", "version", "committed", "pinned"]
    assert [row.split()[:2] for row in rows] == [[code, str(listed[code]["version"])] for code in sorted(listed)]


def test_a_repeated_put_without_waiting(cli: DictCli) -> None:
    """R8: the same --event-id with --no-wait prints the status of the update."""
    args = ["k", "1", "--event-id", str(uuid4())]
    assert cli.put(*args).code == 0
    again = cli.put(*args, "--no-wait")
    assert again.out.startswith("committed as version 1")
    assert again.code == 0


def test_a_put_that_failed_before_fails_without_waiting(cli: DictCli) -> None:
    """R8: the same --event-id of a failed update returns the reason again."""
    args = ["NOK", WRONG_DIGITS, "--event-id", str(uuid4())]
    assert cli.put(*args, code="CURRENCY").code != 0
    again = cli.put(*args, "--no-wait", code="CURRENCY")
    assert "SQL_ERROR" in again.out + again.err


def test_a_key_that_is_no_text_is_refused(cli: DictCli) -> None:
    """R8: bytes of the shell that are not UTF-8 are a mistake of the caller's."""
    assert cli.put(b"\xff", "1").code == 2


@pytest.mark.parametrize("by", ["put", "import"])
def test_what_is_nested_too_deep_is_refused(cli: DictCli, by: str) -> None:
    """R8: JSON no parser reads is a mistake of the caller's."""
    deep = b'{"a":' * 100_000
    assert (cli.put("k", "-", given=deep) if by == "put" else cli.load("deep.json", deep)).code == 2


def test_an_empty_list_of_updates(cli: DictCli) -> None:
    """R7: without pending or failed updates, the output says so."""
    assert cli.run("updates", cli.tenant).out == "no FAILED updates\n"
    assert cli.run("updates", cli.tenant, "--status", "PENDING").out == "no PENDING updates\n"
    assert cli.json("updates", cli.tenant) == {"updates": [], "next": None}


def test_history_tells_the_versions_the_latest_first(cli: DictCli) -> None:
    """R30: what made each version; a longer history says so."""
    assert cli.run("history", cli.tenant, "LOOSE").out == "LOOSE has no version yet\n"
    cli.put("a", "1", "--revision", "7")
    cli.load("all.json", b'{"a": 1, "b": 2}')
    lines = cli.run("history", cli.tenant, "LOOSE").out.splitlines()
    assert lines[0].split() == ["version", "committed", "type", "source", "items", "keys"]
    assert [line.split()[0] for line in lines[1:]] == ["2", "1"]
    assert [line.split()[2:] for line in lines[1:]] == [["SNAPSHOT", "REST", "2", "all"], ["DELTA", "REST", "1", "a"]]
    latest = cli.run("history", cli.tenant, "LOOSE", "--limit", "1").out.splitlines()
    assert (len(latest), latest[-1]) == (3, "there are more; --limit shows them")
    assert [version["sourceRevision"] for version in cli.versions()] == [None, 7]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("list.json", b'[{"key": "NO", "payload": {"name": "Norway"}}, {"key": "SE", "payload": {"name": "Sweden"}}]'),
        ("object.json", b' {"NO": {"name": "Norway"}, "SE": {"name": "Sweden"}}'),
        (
            "lines.jsonl",
            b'{"key": "NO", "payload": {"name": "Norway"}}\n\n{"key": "SE", "payload": {"name": "Sweden"}}\n',
        ),
        ("lines.ndjson", b'{"key":"NO","payload":{"name":"Norway"}}\r\n{"key":"SE","payload":{"name":"Sweden"}}'),
    ],
)
def test_a_file_becomes_the_dictionary(cli: DictCli, server_database: str, name: str, content: bytes) -> None:
    """R13: whatever its form, a file's items are all there is, under one version."""
    cli.put("gone", "1")
    done = cli.load(name, content)
    assert done.code == 0
    assert done.out.startswith("2 items, committed as version 2  (event ")
    assert cli.items(server_database) == {"NO": {"name": "Norway"}, "SE": {"name": "Sweden"}}


def test_csv_has_a_column_for_the_key(cli: DictCli, server_database: str) -> None:
    """R13: a row is an object of texts; quotes, line ends in cells and a byte order mark are understood."""
    content = '\ufeffcode,name\r\nNO,"Nor\nway"\r\nCI,"Côte d\'Ivoire, ""CI"""\r\n'
    document = cli.load("c.csv", content.encode(), "--key", "code", "--json")
    assert (document.code, json.loads(document.out)["items"]) == (0, 2)
    expected = {"NO": {"code": "NO", "name": "Nor\nway"}, "CI": {"code": "CI", "name": 'Côte d\'Ivoire, "CI"'}}
    assert cli.items(server_database) == expected


def test_csv_lines_end_where_csv_says(cli: DictCli, server_database: str) -> None:
    """R13: a file is read exactly: a cell may hold any sign but the line's end."""
    content = "code,name\nNO,Nor\u2028way\nSE,Swe\x85den\n"
    assert cli.load("c.csv", content.encode(), "--key", "code").code == 0
    found = {key: payload["name"] for key, payload in cli.items(server_database).items()}
    assert found == {"NO": "Nor\u2028way", "SE": "Swe\x85den"}


def test_a_row_with_too_many_cells_is_refused(cli: DictCli) -> None:
    """R13: a CSV whose rows do not match its head is a mistake of the file's."""
    assert cli.load("c.csv", b"code,name\nNO,Norway,more\n", "--key", "code").code == 2


def test_a_key_that_is_twice_in_an_object_is_refused(cli: DictCli) -> None:
    """R13: a snapshot names each key once, also as an object."""
    assert cli.load("twice.json", b'{"a": 1, "a": 2}').code == 2


def test_a_delta_leaves_the_rest(cli: DictCli, server_database: str) -> None:
    """R13: with --delta a file adds, changes and deletes."""
    cli.load("all.json", b'{"a": 1, "b": 2, "c": 3}')
    done = cli.load("some.json", b'[{"key": "a", "op": "DELETE"}, {"key": "b", "payload": 20}]', "--delta")
    assert done.out.startswith("2 items, committed as version 2")
    assert cli.items(server_database) == {"b": 20, "c": 3}


def test_an_empty_list_empties_the_dictionary(cli: DictCli, server_database: str) -> None:
    """R13: a file that says there is nothing is taken at its word; one that says nothing is not."""
    cli.put("a", "1")
    assert cli.load("none.json", b"").code == 2
    assert cli.items(server_database) == {"a": 1}
    assert cli.load("none.json", b"[]").out.startswith("0 items, committed as version 2")
    assert cli.items(server_database) == {}


def test_a_large_file_goes_in_several_commands_and_becomes_one_version(cli: DictCli, server_database: str) -> None:
    """R13: what one command cannot carry is cut into chunks; progress goes to standard error."""
    items = {f"k{number}": {"text": "x" * 100, "number": number} for number in range(25_000)}
    done = cli.load("large.json", json.dumps(items).encode(), "--revision", "3")
    assert done.code == 0, done.err
    assert done.out.startswith("25000 items, committed as version 1")
    sending = done.err.splitlines()
    assert len(sending) >= 4
    assert sending[-1] == f"sending {len(sending)} of {len(sending)}"
    assert cli.items(server_database) == items
    (only,) = cli.versions()
    assert (only["items"], only["sourceRevision"]) == (25_000, 3)


def test_a_large_file_that_is_refused_changes_nothing(cli: DictCli) -> None:
    """R13: one bad item among thousands, and none is taken."""
    cli.put("NOK", '{"name": "Krone", "digits": 2}', code="CURRENCY")
    good = [f"{chr(65 + n // 676)}{chr(65 + n // 26 % 26)}{chr(65 + n % 26)}" for n in range(10_000)]
    items = {key: {"name": "x" * 100, "digits": 9 if key == good[3] else 2} for key in good}
    done = cli.load("large.json", json.dumps(items).encode(), code="CURRENCY")
    assert (done.code != 0, done.out) == (True, "")
    assert "sending 2 of " in done.err
    assert "mdm_currency_digits_check" in done.err
    assert len(cli.versions("CURRENCY")) == 1


def test_a_large_delta_tells_that_a_part_of_it_failed(cli: DictCli) -> None:
    """R7: success means that all of the file is there."""
    good = [f"{chr(65 + n // 676)}{chr(65 + n // 26 % 26)}{chr(65 + n % 26)}" for n in range(10_000)]
    items = {key: {"name": "x" * 100, "digits": 9 if key == good[3] else 2} for key in good}
    done = cli.load("large.json", json.dumps(items).encode(), "--delta", code="CURRENCY")
    assert "sending 2 of 2" in done.err
    assert done.code == 1


@pytest.mark.parametrize(
    ("name", "content", "args"),
    [
        ("rubbish.json", b"\xff\xfe\x00", []),
        ("rubbish.json", b"[1, 2]", []),
        ("rubbish.json", b'[{"kye": "a"}]', []),
        ("rubbish.json", b'{"a": 1', []),
        ("rubbish.json", b'{"a": null}', []),
        ("rubbish.json", b'[{"key": "a", "op": "DELETE"}]', []),
        ("rubbish.json", b'[{"key": "a", "payload": 1}, {"key": "a", "payload": 2}]', []),
        ("rubbish.jsonl", b'{"key": "a", "payload": 1}\n{"key"\n', []),
        ("rubbish.csv", b"\xff\xfe\x00", ["--key", "a"]),
        ("rubbish.csv", b"", ["--key", "a"]),
        ("rubbish.csv", b"code,name\nNO,Norway\n", []),
        ("rubbish.csv", b"code,name\nNO,Norway\n", ["--key", "id"]),
        ("rubbish.csv", b'code,name\nNO,"Norway\n', ["--key", "code"]),
        ("rubbish.csv", b"name,code\nNorway\n", ["--key", "code"]),
        ("rubbish.csv", b"code,name\nNO,a\nNO,b\n", ["--key", "code"]),
        ("rubbish.csv", b"code,name\nNO,\x00\n", ["--key", "code"]),
    ],
)
def test_rubbish_is_refused(cli: DictCli, name: str, content: bytes, args: list[str]) -> None:
    """R8: exit code 2, a reason, a hint, and no version."""
    done = cli.load(name, content, *args)
    assert (done.code, done.out) == (2, "")
    assert "error: " in done.err
    assert "hint: " in done.err
    assert "mistake in Penstock" not in done.err
    assert cli.versions() == []


def test_a_missing_file_is_an_error(cli: DictCli) -> None:
    """R8: exit code 5, and its name."""
    for name in ("nowhere.json", "."):
        done = cli.run("import", cli.tenant, "LOOSE", name)
        assert (done.code, done.out) == (5, "")
        assert f"cannot read {name}" in done.err


@pytest.mark.parametrize(
    "args",
    [
        ["put", "t", "LOOSE", "k", "1"],
        ["ls", "t"],
        ["updates", "t"],
        ["history", "t", "LOOSE"],
        ["import", "t", "LOOSE", "f.json"],
    ],
)
def test_an_unreachable_server(cli: DictCli, tmp_path: Path, args: list[str]) -> None:
    """R8: exit code 7, and how to start it."""
    (tmp_path / "f.json").write_text("{}")
    cli.up = type("Away", (), {"api": "http://127.0.0.1:1"})()
    done = cli.run(*args)
    assert (done.code, done.out) == (7, "")
    assert "does not answer" in done.err
    assert "penstock up" in done.err
