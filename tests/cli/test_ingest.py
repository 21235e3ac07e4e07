"""`penstock ingest` as a user types it: output, exit codes, and what to do next."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest

from penstock.ingest.tree import paths
from tests.ingest.harness import KEYED, SUPPLIER, IngestHarness, snapshot
from tests.support.processes import Result, Up, penstock, penstock_here, penstock_on_a_terminal
from tests.support.settings import write_config
from tests.support.types import Json

ROOT = Path(__file__).parents[2]
ONE = snapshot({"A": 1, "B": 2, "C": 3, "D": "none"})
TWO = snapshot({"A": 1, "B": 5, "D": 4})
BROKEN = snapshot({"A": "none"})
# The program, except that it waits for a signal before it reads its file.
PAUSED = """
import os, signal, sys
from penstock.cli import main
from penstock.ingest.run import run as run_module

process_file = run_module.process_file
received, wakeup = os.pipe()
os.set_blocking(wakeup, False)
signal.set_wakeup_fd(wakeup)

def wait_and_process(*args):
    print("reading", flush=True)
    os.read(received, 1)
    return process_file(*args)

run_module.process_file = wait_and_process
main.run()
"""


def ingest(harness: IngestHarness, *args: str) -> Result:
    done = penstock_here("ingest", *args, "--root", str(harness.root), cwd=harness.root.parent)
    assert "Traceback" not in done.err
    assert "mistake in Penstock" not in done.err
    return done


def ingest_json(harness: IngestHarness, *args: str, code: int = 0) -> Json:
    done = ingest(harness, *args, "--json")
    assert done.code == code, done
    found: Json = json.loads(done.out)
    return found


@pytest.fixture
def harness(tmp_path: Path) -> IngestHarness:
    return IngestHarness(tmp_path / "root", KEYED)


def test_a_run_publishes(harness: IngestHarness) -> None:
    """I6, I21: 0 and PASS, what was good and bad, what changed, and where the file went."""
    harness.drop(ONE, "first.csv")
    first = ingest(harness, "run", SUPPLIER)
    run_id = harness.current()
    archived = f"{paths.make_archive_path(SUPPLIER)}/first.csv"
    assert (first.code, first.err) == (0, "")
    assert first.out.splitlines() == [
        f"PASS  {run_id}  first.csv",
        "3 good rows, 1 bad",
        f"hint: `penstock ingest bad-rows {run_id} --root {harness.root}` lists the bad rows",
        f"moved first.csv to {archived}",
    ]
    harness.drop(TWO, "second.csv")
    document = ingest_json(harness, "run", SUPPLIER)
    assert (document["status"], document["supplier"], document["reason"]) == ("PASS", SUPPLIER, None)
    assert document["moved"] == {"second.csv": f"{paths.make_archive_path(SUPPLIER)}/second.csv"}
    assert document["manifest"] == harness.read_json(paths.make_run_path(harness.current() or "", paths.MANIFEST))
    assert document["manifest"]["changes"] == {
        "previous": run_id,
        "added": 1,
        "removed": 1,
        "changed": 1,
        "unchanged": 1,
    }
    assert document["manifest"]["moved_to"] == document["moved"]["second.csv"]


def test_progress_on_a_terminal(harness: IngestHarness) -> None:
    """I19: rows, their pace and the part that is done are on one line, which is gone at the end; the result is not."""
    harness.drop(snapshot({f"sku-{number}": number for number in range(1_000)}))
    done = penstock_on_a_terminal("ingest", "run", SUPPLIER, "--root", str(harness.root))
    assert done.code == 0
    assert done.out.startswith("PASS  ")
    assert "\x1b" not in done.out
    assert re.search(rf"\r\x1b\[K{SUPPLIER} █+ 100%  1,000 rows, [\d,]+ rows/s", done.err), done.err
    assert done.err.endswith("\r\x1b[K")
    assert "\n" not in done.err


def test_a_run_that_fails(harness: IngestHarness) -> None:
    """I6: 1, its code and a hint; as JSON the same, as it is in the manifest."""
    harness.drop(BROKEN)
    failed = ingest(harness, "run", SUPPLIER)
    assert failed.code == 1
    assert failed.out.startswith("FAIL  ")
    assert "DQ_TOO_MANY_BAD_ROWS: 1 of 1 rows are bad" in failed.out
    assert "hint: " in failed.out
    harness.drop(b"", "empty.csv")
    document = ingest_json(harness, "run", SUPPLIER, code=1)
    assert (document["status"], document["manifest"]["failure_code"]) == ("FAIL", "FILE_EMPTY")
    assert document["manifest"]["hint"]
    assert document["manifest"]["moved_to"] == f"{paths.make_broken_path(SUPPLIER)}/empty.csv"


def test_a_run_with_nothing_to_do(harness: IngestHarness) -> None:
    """I2, I3: 0 with the reason: an empty inbox, a file that may still be written."""
    empty = ingest(harness, "run", SUPPLIER)
    assert (empty.code, empty.out) == (0, "nothing to do: the inbox is empty\n")
    harness.configure({**KEYED, "file_stability_window": 3600})
    harness.put(f"{paths.make_inbox_path(SUPPLIER)}/fresh.csv", ONE)
    waits = ingest_json(harness, "run", SUPPLIER, "--no-wait")
    assert (waits["status"], waits["manifest"]) == ("NOTHING_TO_DO", None)
    assert "fresh.csv" in waits["reason"]
    assert harness.names(paths.make_inbox_path(SUPPLIER)) == ["fresh.csv"]


def test_a_run_waits_until_a_file_is_whole(harness: IngestHarness) -> None:
    """I3: without --no-wait it says what it waits for, and takes the file as soon as it has stayed as it was."""
    harness.configure({**KEYED, "file_stability_window": 0.4})
    file, later = harness.put(f"{paths.make_inbox_path(SUPPLIER)}/fresh.csv", ONE), time.time() + 3600
    os.utime(file, (later, later))  # never old enough by its date: it has to be watched
    done = ingest(harness, "run", SUPPLIER)
    assert done.code == 0
    assert "waiting up to 0.4 s for fresh.csv" in done.err
    assert done.out.startswith("PASS")


def test_a_second_caller_gets_the_name_of_the_holder(harness: IngestHarness) -> None:
    """I4: exit code 6, naming the holder; nothing was touched."""
    harness.drop(ONE)
    with harness.tree.lock(SUPPLIER, "the night shift"):
        done = ingest(harness, "run", SUPPLIER)
        error = json.loads(ingest(harness, "run", SUPPLIER, "--json").err)["error"]
    assert (done.code, done.out) == (6, "")
    assert "supplier acme is locked by the night shift (pid " in done.err
    assert "hint: " in done.err
    assert (error["code"], error["holder"]) == ("LOCKED", "the night shift")
    assert harness.names(paths.make_inbox_path(SUPPLIER)) == ["price.csv"]


@pytest.mark.parametrize(
    ("args", "code", "expected"),
    [
        (["run", SUPPLIER], 3, "--root DIR"),
        (["run", "../etc", "--root", "."], 2, "is not a valid name of a supplier"),
        (["run", SUPPLIER, "--root", "nowhere"], 5, "the folder nowhere does not exist"),
        (["state", "show", SUPPLIER, "--root", "."], 5, "no published state yet"),
        (["bad-rows", "no_such_run", "--root", "."], 5, "there is no run"),
    ],
)
def test_errors_have_an_exit_code_and_a_hint(tmp_path: Path, args: list[str], code: int, expected: str) -> None:
    """Exit codes as documented; a sentence and a hint, never a traceback."""
    done = penstock_here("ingest", *args, cwd=tmp_path)
    assert (done.code, done.out) == (code, "")
    assert expected in done.err
    assert done.err.startswith("error: ")
    assert done.err.count("hint: ") == 1


def test_mistakes_in_a_configuration_have_line_numbers(harness: IngestHarness) -> None:
    """I18: line and column of each; the file waits in the inbox, and `ingest ls` shows them too."""
    config = "min_fact_count: 1\nmax_bad_ratio: 7\nallow_empty_snapshot: false\ncolumns:\n  sku: {from: sku, kind: x}\n"
    harness.put(paths.make_config_path(SUPPLIER), config.encode())
    harness.drop(ONE)
    document = ingest_json(harness, "run", SUPPLIER, code=1)["manifest"]
    assert document["failure_code"] == "CONFIG_INVALID"
    assert f"{SUPPLIER}.yaml:2:" in document["failure"]
    assert f"{SUPPLIER}.yaml:5:" in document["failure"]
    assert document["hint"]
    assert harness.names(paths.make_inbox_path(SUPPLIER)) == ["price.csv"]
    seen = ingest(harness, "ls")
    assert seen.code == 0
    assert "CONFIG_BROKEN" in seen.out
    assert f"{SUPPLIER}.yaml:2:" in seen.out


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_run_that_is_stopped(harness: IngestHarness, number: signal.Signals) -> None:
    """I16: 130, manifest INTERRUPTED, the file still in the inbox, the state as it was; the next run works."""
    first = harness.publish(ONE)
    harness.drop(TWO)
    command = [sys.executable, "-c", PAUSED, "ingest", "run", SUPPLIER, "--root", str(harness.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "INTERRUPTED" in out
    assert err == "stopping; press Ctrl-C again to stop at once\n"
    assert harness.current() == first
    (run_id,) = set(harness.tree.list_runs(SUPPLIER)) - {first}
    document = harness.read_json(paths.make_run_path(run_id, paths.MANIFEST))
    assert (document["status"], document["failure_code"], document["moved_to"]) == ("FAIL", "INTERRUPTED", None)
    assert harness.names(paths.make_inbox_path(SUPPLIER)) == ["price.csv"]
    assert harness.run().is_pass
    assert harness.current() not in (first, run_id)


@dataclass
class Seen:
    """A harness after many runs, and their ids."""

    harness: IngestHarness
    first: str
    second: str
    failed: str


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    harness = IngestHarness(tmp_path_factory.mktemp("seen") / "root", {**KEYED, "keep_raw": True})
    first, second = harness.publish(ONE), harness.publish(TWO)
    harness.drop(ONE, "again.csv")
    harness.drop(BROKEN, "broken.csv")
    failed = harness.run().manifest
    assert failed is not None
    return Seen(harness, first, second, failed.run_id)


def test_bad_rows_are_shown(seen: Seen) -> None:
    """I9: the bad rows with reasons and values, and the number of rows per reason."""
    text = ingest(seen.harness, "bad-rows", seen.first)
    assert text.code == 0
    assert text.out.splitlines()[0].split() == ["NOT_INTEGER", "1"]
    assert text.out.splitlines()[-1].split() == ["5", "NOT_INTEGER", "price", "none"]
    document = ingest_json(seen.harness, "bad-rows", seen.failed)
    assert (document["badRows"], document["reasons"]) == (1, {"NOT_INTEGER": 1})
    assert [row["reason_code"] for row in document["rows"]] == ["NOT_INTEGER"]
    assert ingest(seen.harness, "bad-rows", seen.second).out == f"{seen.second} has no bad rows\n"


def test_quarantine_is_listed(seen: Seen) -> None:
    """I2, I6: each file that was set aside, why, and which run did it."""
    files = {Path(file["path"]).name: file for file in ingest_json(seen.harness, "quarantine", "ls")["files"]}
    assert {name: (file["reason"], file["runId"]) for name, file in files.items()} == {
        "again.csv": ("accepted before", None),
        "broken.csv": ("DQ_TOO_MANY_BAD_ROWS", seen.failed),
    }
    assert files["broken.csv"]["bytes"] == len(BROKEN)
    text = ingest(seen.harness, "quarantine", "ls", SUPPLIER)
    assert text.code == 0
    assert f"{paths.make_broken_path(SUPPLIER)}/broken.csv" in text.out
    assert seen.failed in text.out
    assert ingest(seen.harness, "quarantine", "ls", "other").code == 5


def test_state_is_shown_and_read(seen: Seen) -> None:
    """I14, §17: the pointer and where it comes from; the facts are those the pointer's hash is of."""
    document = ingest_json(seen.harness, "state", "show", SUPPLIER)
    assert document["runId"] == seen.second
    assert document["manifest"] == seen.harness.read_json(paths.make_run_path(seen.second, paths.MANIFEST))
    text = ingest(seen.harness, "state", "show", SUPPLIER)
    assert ["run", seen.second] in [line.split() for line in text.out.splitlines()]
    assert ["previous_run", seen.first] in [line.split() for line in text.out.splitlines()]
    read = ingest(seen.harness, "state", "read", SUPPLIER)
    assert sha256(read.out.encode()).hexdigest() == document["sha256"]
    assert [json.loads(line)["payload"]["sku"] for line in read.out.splitlines()] == ["A", "B", "D"]


def test_a_damaged_state_is_not_read(harness: IngestHarness) -> None:
    """I14, §17: a state that was changed on disk is not read; the command fails with an error."""
    run_id = harness.publish(ONE)
    file = harness.root / paths.make_state_path(SUPPLIER, run_id, paths.FACTS)
    file.chmod(0o644)
    file.write_bytes(file.read_bytes().replace(b'"price":1', b'"price":7'))
    done = ingest(harness, "state", "read", SUPPLIER)
    assert (done.code, done.out) == (1, "")
    assert "is damaged" in done.err
    assert "hint: " in done.err


def test_what_a_publication_changed(seen: Seen) -> None:
    """I21: added, removed and changed, with what was and what is; any two runs can be compared."""
    text = ingest(seen.harness, "diff", SUPPLIER).out.splitlines()
    assert text[0] == f"compared with {seen.first}: 1 added, 1 removed, 1 changed, 1 unchanged"
    assert text[1:] == [
        '+ {"price": 4, "sku": "D"}',
        '- {"price": 3, "sku": "C"}',
        '~ {"price": 2, "sku": "B"}',
        '  {"price": 5, "sku": "B"}',
    ]
    back = ingest_json(seen.harness, "diff", SUPPLIER, "--from", seen.second, "--to", seen.first, "--limit", "0")
    assert (back["added"], back["removed"], back["changed"], back["shown"]) == (1, 1, 1, [])
    other = ingest(seen.harness, "diff", "globex", "--from", seen.first, "--to", seen.second)
    assert (other.code, other.err.count("hint: ")) == (2, 1)


def test_gc_lists_what_it_deletes(harness: IngestHarness) -> None:
    """I12: a dry run tells and removes nothing; then the same goes, and then nothing is too old."""
    first = harness.publish(ONE)
    harness.publish(TWO)
    settings = {"ingest": {"root": str(harness.root), "retention": {"state_retention_hours": 0, "archive": 0}}}
    config = harness.root.parent / "penstock.yaml"
    config.write_text(json.dumps(settings))

    def gc(*args: str) -> Result:
        return penstock_here("ingest", "gc", *args, cwd=harness.root.parent)

    dry = json.loads(gc("--dry-run", "--json").out)
    assert (dry["dryRun"], dry["busy"]) == (True, [])
    assert {entry["path"] for entry in dry["expired"]} == {
        paths.make_state_path(SUPPLIER, first),
        f"{paths.make_archive_path(SUPPLIER)}/price.csv",
        f"{paths.make_archive_path(SUPPLIER)}/price.csv.1",
    }
    assert first in harness.tree.list_states(SUPPLIER)
    done = gc()
    assert done.code == 0
    assert f"3 deleted, {sum(entry['bytes'] for entry in dry['expired']):,} bytes" in done.out
    assert "replaced more than 0 hours ago" in done.out
    assert first not in harness.tree.list_states(SUPPLIER)
    assert gc().out == "nothing has expired\n"


def test_verify_compares_every_hash(harness: IngestHarness) -> None:
    """I24: 0 when all is as it was; 1 naming the file when a byte was changed or a file is gone."""
    run_id = harness.publish(ONE)
    fine = ingest(harness, "verify")
    assert (fine.code, fine.err) == (0, "")
    assert fine.out.endswith(" checked, 0 wrong\n")
    file = harness.root / paths.make_run_path(run_id, paths.FACTS)
    content = file.read_bytes()
    file.unlink()  # a state has the same file under another name
    file.write_bytes(content.replace(b'"price":1', b'"price":2'))
    wrong = ingest(harness, "verify", SUPPLIER)
    assert wrong.code == 1
    assert f"{paths.make_run_path(run_id, paths.FACTS)}: its sha256 is " in wrong.out
    file.unlink()
    (document,) = ingest_json(harness, "verify", code=1)["problems"]
    assert document == {"path": paths.make_run_path(run_id, paths.FACTS), "problem": "the file is missing"}


def test_suppliers_are_listed_with_their_problems(seen: Seen) -> None:
    """I13: published state, inbox and last run of each supplier, and the problems by the configured limits."""
    config = {"ingest": {"alerts": {"failed_runs": 1, "unchanged_files": 1, "state_age": 0}}}
    file = seen.harness.root.parent / "strict.yaml"
    file.write_text(json.dumps(config))
    (strict,) = ingest_json(seen.harness, "ls", "--config", str(file))["suppliers"]
    assert (strict["supplier"], strict["runId"], strict["fence"], strict["facts"]) == (SUPPLIER, seen.second, 2, 3)
    assert (strict["failedRuns"], strict["broken"], strict["inbox"]) == (1, 1, [])
    assert sorted(strict["alerts"]) == ["REPEATED_FAIL", "STATE_OLD"]
    calm = ingest(seen.harness, "ls")
    assert (calm.code, len(calm.out.splitlines())) == (0, 2)
    assert "FAIL DQ_TOO_MANY_BAD_ROWS" in calm.out
    assert "REPEATED_FAIL" not in calm.out


READ = (
    ["ls"],
    ["show", SUPPLIER],
    ["bad-rows", "FAILED"],
    ["diff", SUPPLIER],
    ["state", "show", SUPPLIER],
    ["quarantine", "ls"],
    ["quarantine", "ls", SUPPLIER],
)


def test_a_server_and_a_folder_give_the_same_documents(seen: Seen, tmp_path: Path) -> None:
    """I13, I21: commands that read work with --url as with --root, and without both they use the server."""
    write_config(tmp_path, {"ingest": {"root": str(seen.harness.root)}})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with Up(tmp_path) as up:
        for command in READ:
            args = [seen.failed if word == "FAILED" else word for word in command]
            local = ingest_json(seen.harness, *args)
            remote = penstock_here("ingest", *args, "--url", up.api, "--json", cwd=elsewhere)
            assert _without_ages(json.loads(remote.out)) == _without_ages(local), args
            found = penstock("ingest", *args, cwd=elsewhere, env={"PENSTOCK_URL": up.api})
            assert (found.code, bool(found.out)) == (0, True), args
        facts = penstock_here("ingest", "state", "read", SUPPLIER, "--url", up.api, cwd=elsewhere)
        assert facts.out == ingest(seen.harness, "state", "read", SUPPLIER).out
        unknown = penstock_here("ingest", "show", "unknown", "--url", up.api, cwd=elsewhere)
        assert (unknown.code, unknown.out, unknown.err.count("hint: ")) == (5, "", 1)
        both = penstock_here("ingest", "ls", "--url", up.api, "--root", ".", cwd=elsewhere)
        assert (both.code, "exclude each other" in both.err) == (2, True)


def _without_ages(document: Json) -> Json:
    """Return *document* without ages, and without runs: the database knows only the runs it recorded."""
    ignored = ("ageSeconds", "holder", "runs")
    return {
        name: [_without_ages(entry) for entry in value]
        if isinstance(value, list) and value and isinstance(value[0], dict)
        else value
        for name, value in document.items()
        if name not in ignored
    }


def test_a_wheel_knows_its_commit(tmp_path: Path) -> None:
    """I8: code that was installed from a wheel tells the commit that was checked out when it was built."""
    clone, unpacked = tmp_path / "clone", tmp_path / "unpacked"
    subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(clone)], check=True)
    commit = subprocess.run(["git", "-C", str(clone), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=clone, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(unpacked)
    code = (
        f"import sys; sys.path.insert(0, {str(unpacked)!r})\n"
        "from penstock.kernel.telemetry import build\n"
        "print(build.__file__, build.find_code_commit())"
    )
    document = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    file, found = document.stdout.split()
    assert Path(file).is_relative_to(unpacked)
    assert found == commit.stdout.strip()
    assert not (clone / "src" / "penstock" / "_commit").exists()
