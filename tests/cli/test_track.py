"""`penstock track` as a user types it, against a running `penstock up`."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.processes import Result, Up, penstock


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("up")) as up:
        yield up


def track(server: Up, folder: Path, *args: str) -> Result:
    return penstock("track", *args, cwd=folder, env={"PENSTOCK_URL": server.api})


def test_a_file_from_its_registration_to_a_claim(server: Up, tmp_path: Path) -> None:
    """T1, T5, T6, T12, T16: register, done, show, ls, queue, claim, why, summary, each for people and as JSON."""
    assert "registered" in track(server, tmp_path, "register", "cli", "0", "1").out
    assert json.loads(track(server, tmp_path, "register", "cli", "0", "--json").out)["created"] is False
    assert "not complete yet" in track(server, tmp_path, "why", "cli", "0").out
    assert track(server, tmp_path, "done", "event-ingest", "cli", "--as", "me").out == "cli is done in event-ingest\n"
    assert track(server, tmp_path, "queue", "shard-splitter").out.count("cli") == 2
    (claimed,) = json.loads(track(server, tmp_path, "claim", "shard-splitter", "--worker", "me", "--json").out)
    assert (claimed["filename"], claimed["shard"], claimed["fence"]) == ("cli", 0, 1)
    assert "started by me" in track(server, tmp_path, "why", "cli", "0").out
    assert "shard-splitter" in track(server, tmp_path, "show", "cli").out
    assert json.loads(track(server, tmp_path, "ls", "--status", "started", "--json").out)["files"]
    assert json.loads(track(server, tmp_path, "summary", "--json").out)["by_stage"]["event_ingest"]["done"] >= 2
    text = track(server, tmp_path, "summary").out
    assert re.search(r"^stage +new +started +done +failed$", text, re.MULTILINE)
    assert re.search(r"^shard +total +done +failed$", text, re.MULTILINE)
    for stage, shard in (("shard-worker", ()), ("event-ingest", ("0",))):
        assert "SHARD" in track(server, tmp_path, "done", stage, "cli", *shard).err
    assert "`penstock track show cli" in track(server, tmp_path, "why", "cli", "7").err
    assert "new → started" in track(server, tmp_path, "history", "cli").out


@pytest.mark.full
def test_the_command_line_retries_and_pauses(server: Up, tmp_path: Path) -> None:
    """T4, T19: one row, or all that failed with an error; a stage is paused with its reason and resumed."""
    pipeline = f"{server.api}/api/v1/pipeline"
    assert track(server, tmp_path, "register", "broken", "0", "1", "2").code == 0
    for shard in range(3):
        body = {"filename": "broken", "shard": shard, "error": f"disk {shard} is full"}
        httpx.post(f"{pipeline}/stages/mysql-sender/fail", json=body).raise_for_status()
    assert track(server, tmp_path, "retry", "mysql-sender", "broken", "0").code == 0
    assert (
        track(server, tmp_path, "retry", "mysql-sender", "--error", "disk 1").out
        == "1 shard reset to new in mysql-sender\n"
    )
    assert track(server, tmp_path, "retry", "mysql-sender", "--all").out == "1 shard reset to new in mysql-sender\n"
    assert track(server, tmp_path, "pause", "mysql-sender", "--reason", "disk replacement").code == 0
    assert "disk replacement" in track(server, tmp_path, "queue").out
    assert track(server, tmp_path, "resume", "mysql-sender").code == 0
    assert "disk replacement" not in track(server, tmp_path, "queue").out


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("show", "unknown"), 5, "no file 'unknown' is registered"),
        (("register", "a/b", "0"), 2, "must not contain a slash"),
        (("retry", "mysql-sender"), 2, "nothing is selected to retry"),
        (("claim", "event-ingest", "--worker", "w"), 2, "event-ingest"),
        (("why", "unknown", "0", "--url", "http://127.0.0.1:1"), 7, "does not answer"),
    ],
)
def test_invalid_commands_are_refused(server: Up, tmp_path: Path, args: tuple[str, ...], code: int, words: str) -> None:
    """T9: the right exit code and a sentence, no traceback."""
    done = track(server, tmp_path, *args)
    assert done.code == code
    assert words in done.err
    assert "Traceback" not in done.err
