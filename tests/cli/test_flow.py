"""`penstock flow` as a user types it, against a running `penstock up`: output, exit codes, and what to do next."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.main import app, run_program
from tests.services.postgres import module_database
from tests.support.processes import Result, ServerCli, Up, Work
from tests.support.settings import write_config
from tests.support.wait import until

ROOT = Path(__file__).parents[2]
NOWHERE = "http://127.0.0.1:9"
FLOWS: dict[str, dict[str, Any]] = {
    "greetings": {
        "scope": {"name": "world"},
        "steps": {
            "hello": {"kind": "python", "inputs": {"call": "json:dumps", "args": {"obj": "${scope.name}"}}},
            "by-hand": {"kind": "BY_HAND", "dependsOn": ["hello"]},
        },
    },
    "nightly": {"schedule": {"cron": "30 2 * * *"}, "steps": {"a": {"kind": "BY_HAND"}}},
    "empty": {"steps": {}},
}
GOOD = "name: {name}\nsteps:\n  a: {{kind: load}}\n  b: {{kind: load, dependsOn: [a]}}\n"
RING = "name: ring\nsteps:\n  a: {kind: load, dependsOn: [b]}\n  b: {kind: load, dependsOn: [a]}\n"
PYTHON = """
from penstock.flows.definition.python_dsl import Flow
one = Flow("one")
first = one.step("first", "load")
one.step("last", "load", after=[first])
two = Flow("two")
"""
Typed = Callable[..., Result]


class FlowCli(ServerCli):
    """`penstock flow` against one server, and a worker of steps of the kind BY_HAND."""

    def __init__(self, up: Up) -> None:
        super().__init__("flow", up.api)
        self.http = httpx.Client(base_url=f"{up.api}/api/v1")

    def by_hand(self, status: str = "SUCCEEDED", **more: Any) -> str:
        """Claim a step without a worker, end it, and return its run."""
        asked = {"worker": "hand", "kinds": ["BY_HAND"], "waitSeconds": 20}
        [item] = self.http.post("/flow_steps/claim", json=asked, timeout=30).raise_for_status().json()["items"]
        path = f"/flow_runs/{item['runId']}/steps/{item['stepId']}"
        lines = [{"level": "warning", "message": "by \x1b[31mhand"}]
        self.http.post(f"{path}/logs", json={"fence": item["fence"], "lines": lines}).raise_for_status()
        report = {"fence": item["fence"], "status": status, **more}
        self.http.post(f"{path}/report", json=report).raise_for_status()
        return str(item["runId"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "flows").mkdir()
    for name, flow in FLOWS.items():
        (folder / "flows" / f"{name}.yaml").write_text(json.dumps({"name": name, **flow}))
    (folder / "flows" / "broken.yaml").write_text("name: broken\nsteps: {a: {}}")
    with module_database() as url:
        config = {"database": {"url": url}, "flows": {"folder": str(folder / "flows"), "python": ["json"]}}
        write_config(folder, config)
        with Up(folder) as up:
            yield up


@pytest.fixture
def cli(server: Up) -> Iterator[FlowCli]:
    asked = FlowCli(server)
    with asked.http:
        yield asked


FAILED = {"error": {"code": "BROKEN", "message": "no disk"}}


def test_a_run_from_its_beginning_to_its_end(cli: FlowCli) -> None:
    """F2, F10: run, show, why, logs, retry: what one does at the terminal."""
    started = cli.text("run", "greetings", "--run-id", "g1", "--scope", "name=you", "--scope", 'list=["a", 1]')
    assert started.startswith("run g1 is RUNNING; ")
    assert ", it already existed" in cli.text(
        "run", "greetings", "--run-id", "g1", "--scope", "name=you", "--scope", 'list=["a", 1]'
    )
    assert cli.by_hand("FAILED", **FAILED) == "g1"
    shown = cli.text("show", "g1")
    assert "FAILED  g1  greetings" in shown
    assert "by-hand: BROKEN: no disk" in shown
    assert f"`penstock flow retry g1 --url {cli.url}`" in shown
    document = cli.json("show", "g1")
    assert document["scope"] == {"name": "you", "list": ["a", 1]}
    assert document["steps"]["hello"]["status"] == "SUCCEEDED"
    assert "by-hand is FAILED: it failed" in cli.text("show", "g1", "--why", "by-hand")
    assert r"warning  by \x1b[31mhand" in cli.text("logs", "g1", "by-hand")
    assert cli.text("logs", "g1", "hello") == "step hello has logged nothing\n"
    assert cli.text("retry", "g1") == "retrying: by-hand\n"
    cli.by_hand()
    assert "SUCCEEDED  g1" in cli.text("show", "g1")
    whole = cli.text("logs", "g1")
    assert r"by-hand  1  warning  by \x1b[31mhand" in whole
    assert cli.json("logs", "g1")["lines"][0]["stepId"] == "by-hand"
    assert "--attempt needs a step" in cli.refused(2, "logs", "g1", "--attempt", "1")


def test_wait_sets_the_exit_code(cli: FlowCli, tmp_path: Path) -> None:
    """F2: --wait ends with 0, 1 or 124; a run that is given up on goes on."""
    assert "SUCCEEDED" in cli.text("run", "empty", "--wait")
    late = cli.run("run", "greetings", "--run-id", "late", "--wait", "--timeout", "1")
    assert (late.code, late.out) == (124, "")
    assert "the run continues" in late.err
    cli.by_hand("FAILED", **FAILED)
    failed = cli.run("run", "greetings", "--run-id", "late", "--wait")
    assert failed.code == 1
    assert "BROKEN: no disk" in failed.out
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nscope: {a: 1, b: 2}\npolicy: {failFast: true}\nsteps: {}")
    run = cli.json("run", str(file), "--scope", "b=3", "--wait")
    assert (run["status"], run["scope"], run["failFast"], run["flow"]) == ("SUCCEEDED", {"a": 1, "b": 3}, True, None)


def test_a_run_is_resumed_at_a_step(cli: FlowCli) -> None:
    """F19: --resume RUN --from STEP makes a new one, with what was done before."""
    cli.text("run", "greetings", "--run-id", "old")
    cli.by_hand()
    made = cli.json("run", "--resume", "old", "--from", "by-hand", "--run-id", "new")
    assert made["runId"] == "new"
    assert cli.json("show", "new")["steps"]["hello"]["reason"] == "reused from run old"
    cli.by_hand()
    assert "--from STEP" in cli.refused(2, "run", "greetings", "--resume", "old")


def test_a_step_is_done_without_and_a_run_is_stopped(cli: FlowCli) -> None:
    """F9, F10: skip and cancel, with the reason that is kept."""
    cli.text("run", "nightly", "--run-id", "s1")
    assert cli.text("skip", "s1", "a", "--reason", "not today") == "step a of run s1 is SKIPPED\n"
    assert "not today" in cli.text("show", "s1")
    cli.text("run", "nightly", "--run-id", "s2")
    assert cli.text("cancel", "s2", "--reason", "wrong day") == "run s2 is CANCELLED\n"
    assert "wrong day" in cli.text("runs", "nightly")
    assert cli.refused(6, "cancel", "s1").startswith("error: run s1 has SUCCEEDED")


def test_flows_are_listed_and_shown(cli: FlowCli) -> None:
    """F15: the flows of a server with schedule and last run; one flow with its steps and last runs."""
    cli.text("run", "empty", "--run-id", "f1", "--wait")
    listed = cli.run("ls")
    rows = {line.split()[0]: line for line in listed.out.splitlines()[1:]}
    assert set(rows) == set(FLOWS)
    assert "30 2 * * *" in rows["nightly"]
    assert "SUCCEEDED" in rows["empty"]
    assert "broken.yaml" in listed.err
    assert [flow["name"] for flow in cli.json("ls")["flows"]] == sorted(FLOWS)
    shown = cli.text("show", "nightly")
    assert "schedule: 30 2 * * * UTC, next start: " in shown
    assert "BY_HAND" in shown
    assert "f1" in cli.text("show", "empty")
    assert cli.json("show", "empty")["runs"][0]["status"] == "SUCCEEDED"


def test_artifacts_are_listed_and_downloaded(cli: FlowCli, tmp_path: Path) -> None:
    """F6: an artifact is written to a file as a whole or not at all, or to standard output."""
    cli.text("run", "nightly", "--run-id", "art")
    request = {"worker": "hand", "kinds": ["BY_HAND"], "waitSeconds": 20}
    [item] = cli.http.post("/flow_steps/claim", json=request, timeout=30).raise_for_status().json()["items"]
    step, content = f"/flow_runs/{item['runId']}/steps/{item['stepId']}", b"x" * 300_000
    headers = {"content-type": "application/octet-stream"}
    params = {"fence": item["fence"]}
    cli.http.put(f"{step}/artifacts/big.bin", content=content, params=params, headers=headers).raise_for_status()
    report = {"fence": item["fence"], "status": "SUCCEEDED", "artifacts": ["big.bin"]}
    cli.http.post(f"{step}/report", json=report).raise_for_status()
    [artifact] = cli.json("artifact", "ls", "art")["artifacts"]
    assert (artifact["step"], artifact["name"], artifact["size"]) == ("a", "big.bin", len(content))
    assert "big.bin" in cli.text("artifact", "ls", "art", "a")
    file = tmp_path / "copy.bin"
    assert f"{file}: 300,000 bytes" in cli.run("artifact", "get", "art", "a", "big.bin", "-o", str(file)).err
    assert file.read_bytes() == content
    assert cli.text("artifact", "get", "art", "a", "big.bin") == content.decode()
    file.write_bytes(b"older")
    cli.refused(5, "artifact", "get", "art", "a", "none.bin", "-o", str(file))
    assert [path.name for path in tmp_path.iterdir()] == ["copy.bin"]
    assert file.read_bytes() == b"older"
    assert "steps: a" in cli.refused(5, "artifact", "ls", "art", "b")


def test_runs_are_listed(cli: FlowCli) -> None:
    """F1: the latest first, by flow and status; a longer list ends with a note."""
    for name in ("l1", "l2"):
        cli.text("run", "empty", "--run-id", name)
    runs = cli.json("runs", "empty", "--status", "SUCCEEDED", "--limit", "2")["runs"]
    assert [run["runId"] for run in runs] == ["l2", "l1"]
    assert "there are more; --limit shows them" in cli.text("runs", "empty", "--limit", "1")
    assert cli.text("runs", "never-run").startswith("no runs; ")


def test_schedules_are_seen_and_paused(cli: FlowCli) -> None:
    """F16: when flows run next; pausing one, and files that are none."""
    listed = cli.run("schedule", "ls")
    assert "nightly  30 2 * * *  UTC" in listed.out
    assert "broken.yaml" in listed.err
    assert "the schedule of nightly is paused" in cli.text("schedule", "pause", "nightly")
    assert cli.json("schedule", "ls")[0]["schedule"]["paused"]
    assert "next start: " in cli.text("schedule", "resume", "nightly")
    assert "has no schedule" in cli.refused(6, "schedule", "pause", "greetings")


def test_invalid_requests_are_refused(cli: FlowCli) -> None:
    """Every refusal is a sentence with its exit code, and nothing on standard output."""
    for code, args in (
        (5, ["run", "gretings"]),
        (5, ["show", "none"]),
        (5, ["logs", "none", "a"]),
        (5, ["retry", "none"]),
        (5, ["schedule", "pause", "none"]),
        (2, ["run"]),
        (2, ["run", "greetings", "--scope", "name"]),
        (2, ["show", "not a name"]),
        (2, ["runs", "--status", "ODD"]),
        (2, ["runs", "--since", "yesterday"]),
        (5, ["run", "nowhere.yaml"]),
    ):
        cli.refused(code, *args)


def test_an_unreachable_server(cli: FlowCli) -> None:
    """Exit code 7, and how to start a server."""
    cli.url = NOWHERE
    assert "`penstock up` starts a server" in cli.refused(7, "runs")


def test_workers_run_in_processes_of_their_own(cli: FlowCli, server: Up, tmp_path: Path) -> None:
    """F17: `penstock work flows --url --module` does what the module says; its health and metrics are its own."""
    (tmp_path / "mine.py").write_text(
        "from penstock.flows.sdk import worker\n@worker('MINE')\nasync def mine(step):\n    return {'by': 'me'}\n"
    )
    body = {"runId": "remote", "steps": {"a": {"kind": "MINE"}}}
    cli.http.post("/flow_runs", json=body).raise_for_status()
    with Work(tmp_path, "flows", "--url", server.api, "--module", "mine.py") as worker:
        assert worker.api != server.api
        assert httpx.get(f"{worker.api}/actuator/health/readiness").json()["status"] == "UP"
        until(lambda: cli.json("show", "remote")["status"] == "SUCCEEDED", "the step ends")
        counted = 'penstock_flow_steps_total{kind="MINE",outcome="SUCCEEDED"} 1.0'
        assert counted in httpx.get(f"{worker.api}/actuator/prometheus").text
        assert worker.stop() == 0
    assert cli.json("show", "remote")["steps"]["a"]["outputs"] == {"by": "me"}


def test_all_commands_are_in_the_help() -> None:
    """`penstock flow --help` lists all commands."""
    command = [sys.executable, "-m", "penstock.cli.main", "flow", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    section = done.stdout.partition("Commands:\n")[2].partition("\n\n")[0]
    listed = " ".join(line.split()[0] for line in section.splitlines() if line[2] != " ")
    assert listed == "validate graph ls show runs run logs retry skip cancel artifact schedule"


@pytest.fixture
def flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """The commands of `penstock flow`, typed in a folder with a good flow and a bad one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("good.yaml").write_text(GOOD.format(name="good"))
    Path("ring.yaml").write_text(RING)

    def typed(*args: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["penstock", "flow", *args])
        with pytest.raises(SystemExit) as ended:
            run_program(app, name="penstock")
        output = capsys.readouterr()
        assert "mistake in Penstock" not in output.err
        return Result(int(ended.value.code or 0), output.out, output.err)

    return typed


def test_valid_flows_are_listed_one_per_line(flow: Typed) -> None:
    """F15: the file, the flow, how many steps."""
    Path("empty.yml").write_text("name: empty\n")
    done = flow("validate", "good.yaml", "empty.yml")
    assert (done.code, done.out) == (0, "ok   good.yaml: good, 2 steps\nok   empty.yml: empty, 0 steps\n")


def test_one_bad_flow_is_enough(flow: Typed) -> None:
    """F15: the error has its line, the other flows are validated too, and the exit code is 2."""
    done = flow("validate", "ring.yaml", "good.yaml", "nowhere.yaml")
    ring, good, nowhere = done.out.splitlines()
    assert done.code == 2
    assert ring.startswith("bad  ring.yaml:3:19: steps.a.dependsOn: the dependencies form a cycle: a → b → a")
    assert good == "ok   good.yaml: good, 2 steps"
    assert nowhere == "bad  nowhere.yaml: there is no file nowhere.yaml (check its path)"
    assert flow("validate", "nowhere").out.startswith("bad  nowhere: there is no file, folder or module nowhere")


def test_the_inputs_of_known_kinds_are_looked_at(flow: Typed) -> None:
    """F2, F15: as they are when a run is asked for."""
    Path("http.yaml").write_text("name: http\nsteps:\n  a:\n    kind: http\n    inputs: {uri: x}\n")
    done = flow("validate", "http.yaml")
    assert (done.code, "bad  http.yaml:5:5: steps.a.inputs: step 'a', inputs: " in done.out) == (2, True)


def test_a_folder_is_all_its_files(flow: Typed) -> None:
    """F15: each in its own line; an empty one is a mistake."""
    done = flow("validate", ".")
    assert [line[:15] for line in done.out.splitlines()] == ["ok   good.yaml:", "bad  ring.yaml:"]
    Path("none").mkdir()
    done = flow("validate", "none")
    assert (done.code, done.out.startswith("bad  none: the folder contains no *.yaml file")) == (2, True)


def test_a_recursion_over_several_files_is_an_error(flow: Typed) -> None:
    """F14, F15: each is good by itself; the one that closes the circle is what a server would refuse."""
    inner = "name: {name}\nsteps:\n  s: {{kind: flow, inputs: {{flow: {flow}}}}}\n"
    Path("x.yaml").write_text(inner.format(name="x", flow="y"))
    Path("y.yaml").write_text(inner.format(name="y", flow="x"))
    assert flow("validate", "y.yaml").code == 0
    done = flow("validate", "x.yaml", "y.yaml")
    x, y = done.out.splitlines()
    assert (done.code, x) == (2, "ok   x.yaml: x, 1 step")
    assert y.startswith("bad  y.yaml: flow y contains itself: y → x → y")


def test_programs_read_json(flow: Typed) -> None:
    """F15: with --json, what is wrong is data."""
    done = flow("validate", "--json", "good.yaml", "ring.yaml")
    good, ring = json.loads(done.out)
    assert done.code == 2
    assert good == {"file": "good.yaml", "valid": True, "flow": "good", "steps": 2}
    assert (ring["valid"], ring["error"]["code"]) == (False, "FLOW_INVALID")
    assert ring["error"]["problems"][0]["path"] == "steps.a.dependsOn"


def test_flows_in_python_are_looked_at_too(flow: Typed) -> None:
    """F15: as a file, and as a module that is found here."""
    Path("own_module_of_flows.py").write_text(PYTHON)
    line = "one, 2 steps; two, 0 steps\n"
    assert flow("validate", "own_module_of_flows.py").out == f"ok   own_module_of_flows.py: {line}"
    assert flow("validate", "own_module_of_flows").out == f"ok   own_module_of_flows: {line}"
    Path("broken.py").write_text("1 / 0")
    done = flow("validate", "broken.py", "no_such_module")
    assert done.code == 2
    assert "bad  broken.py: cannot import broken.py: ZeroDivisionError" in done.out
    assert "bad  no_such_module: there is no file, folder or module no_such_module" in done.out


def test_a_flow_is_drawn(flow: Typed) -> None:
    """F15: for people, for Mermaid, and as data."""
    drawn = flow("graph", "good.yaml")
    assert drawn.code == 0
    assert drawn.out.count("▼") == 1
    assert flow("graph", "good.yaml", "--mermaid").out.splitlines()[0] == "flowchart TD"
    output = json.loads(flow("graph", "good.yaml", "--json").out)
    assert (output["flow"], [step["id"] for step in output["steps"]]) == ("good", ["a", "b"])
    assert output["steps"][1]["dependsOn"] == ["a"]
    assert output["mermaid"].startswith("flowchart TD")


def test_one_of_several_is_drawn_by_its_name(flow: Typed) -> None:
    """F15: without one, or with one that is not there, the error lists the flows."""
    Path("several.py").write_text(PYTHON)
    assert "last" in flow("graph", "several.py", "one").out
    done = flow("graph", "several.py")
    assert (done.code, "add the name of one: one, two" in done.err) == (2, True)
    done = flow("graph", "several.py", "three")
    assert (done.code, "its flows: one, two" in done.err) == (5, True)
    assert flow("graph", ".", "good").code == 0, "a bad file beside it is not in the way"


def test_an_invalid_flow_is_not_drawn(flow: Typed) -> None:
    """F15: by the exit code of its error."""
    done = flow("graph", "ring.yaml")
    assert (done.code, "form a cycle" in done.err) == (3, True)
    assert flow("graph", "nowhere.yaml").code == 5
