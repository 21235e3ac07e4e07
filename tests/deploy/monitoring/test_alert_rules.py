"""R27: every alert is tested, explained and reachable: rules, unit tests, runbook and routes."""

import re
import shlex
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from ruamel.yaml import YAML

from penstock.cli.main import app
from tests.deploy.monitoring.delivered_queries import DeliveredQuery, of_rules
from tests.deploy.monitoring.promql import kept
from tests.support.require import require

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yaml"))
TESTS = sorted((PROMETHEUS / "rules" / "tests").glob("*.yaml"))
IDLE = PROMETHEUS / "rules" / "tests" / "idle.yaml"
RUNBOOK = ROOT / "docs" / "runbook"
PARTS = {"platform", "tracking", "refdata", "ingest", "harvest", "flows"}
PROGRAM = typer.main.get_command(app)
HEADINGS = ["Meaning", "Diagnosis", "Resolution", "Verification"]


def _yaml(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text())


def _alerts() -> dict[str, dict[str, Any]]:
    groups = [group for path in RULES for group in _yaml(path)["groups"]]
    found = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    alerts = {rule["alert"]: rule for rule in found}
    assert len(alerts) == len(found), "two rules have one name"
    return alerts


ALERTS = _alerts()
PAGES = {path.stem: path.read_text() for path in RUNBOOK.glob("*.md") if path.stem != "README"}


def _promtool(*arguments: str | Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        require("promtool")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_valid() -> None:
    """R27: Prometheus takes every file of rules, and there is one for every part."""
    assert {path.stem for path in RULES} == PARTS
    _promtool("check", "rules", *RULES)


@pytest.mark.full
def test_the_rules_do_what_their_tests_say() -> None:
    """R27: alerts fire when they should, with the labels and words they should, and not before."""
    _promtool("test", "rules", *TESTS)


def test_the_scrape_configurations_are_valid(tmp_path: Path) -> None:
    """R27: Prometheus takes both; of Kubernetes', which not every build knows, all but the discovery itself."""
    _promtool("check", "config", PROMETHEUS / "prometheus.yaml")
    document = _yaml(PROMETHEUS / "prometheus-kubernetes.yaml")
    (job,) = document["scrape_configs"]
    assert job.pop("kubernetes_sd_configs")
    document["rule_files"] = [str(path) for path in RULES]
    with (tmp_path / "prometheus.yaml").open("w") as file:
        YAML(typ="safe").dump(document, file)
    _promtool("check", "config", tmp_path / "prometheus.yaml")


@pytest.mark.parametrize("name", ["prometheus.yaml", "prometheus-kubernetes.yaml"])
def test_targets_have_the_labels_that_rules_ask_for(name: str) -> None:
    """R27: whichever way targets are found, their job is penstock and they have a role."""
    (job,) = _yaml(PROMETHEUS / name)["scrape_configs"]
    assert job["job_name"] == "penstock"
    relabelled = {source_labels.get("target_label") for source_labels in job.get("relabel_configs", [])}
    fixed = [set(source_labels["labels"]) for source_labels in job.get("static_configs", [])]
    assert "role" in relabelled or (fixed and all("role" in labels for labels in fixed))


def test_pods_are_found_as_the_chart_labels_them() -> None:
    """R27: by their labels and the port's name, without annotations; not those that end by themselves."""
    (job,) = _yaml(PROMETHEUS / "prometheus-kubernetes.yaml")["scrape_configs"]
    steps = [(config["source_labels"], config.get("regex"), config.get("action")) for config in job["relabel_configs"]]
    assert (["__meta_kubernetes_pod_label_app_kubernetes_io_component"], "migrate|doctor", "drop") in steps
    assert (["__meta_kubernetes_pod_phase"], "Running", "keep") in steps
    assert (["__meta_kubernetes_pod_container_port_name"], "http", "keep") in steps
    assert "annotation" not in str(job)


def test_the_manual_names_jobs_that_exist() -> None:
    """R27: every job is documented in the file that the manual names."""
    annotations = re.findall(
        r"job\s+`([\w-]+)`\s+of\s+\[([\w.-]+)\]", (ROOT / "docs" / "deploy" / "monitoring.md").read_text()
    )
    assert annotations
    for name, file in annotations:
        assert name in {job["job_name"] for job in _yaml(PROMETHEUS / file)["scrape_configs"]}


@pytest.mark.parametrize("rule", of_rules(), ids=lambda rule: rule.place)
def test_installations_are_kept_apart(rule: DeliveredQuery) -> None:
    """R27: with two in one Prometheus, none is added to the other, nor hides what is wrong with it."""
    assert [labels for labels in kept(rule.query) if "namespace" not in labels] == []


def _evaluations(path: Path) -> Iterator[tuple[str, bool]]:
    """Each alert that is looked at, and whether it fires then."""
    for test in _yaml(path)["tests"]:
        for look in test["alert_rule_test"]:
            yield look["alertname"], bool(look["exp_alerts"])


@cache
def _tested() -> frozenset[tuple[str, bool]]:
    return frozenset(evaluation for path in TESTS if path != IDLE for evaluation in _evaluations(path))


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_is_seen_to_fire_and_to_be_silent(alert: str) -> None:
    """R27: no alert that cannot fire, none that always does, none on an idle system."""
    assert (alert, True) in _tested()
    assert (alert, False) in _tested()
    assert {fires for name, fires in _evaluations(IDLE) if name == alert} == {False}


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_has_summary_description_and_runbook(alert: str) -> None:
    """R27: how urgent it is, what it is about, and which page helps."""
    rule = ALERTS[alert]
    assert alert.startswith("Penstock")
    assert rule["labels"]["severity"] in {"page", "ticket"}
    annotations = rule["annotations"]
    assert annotations["summary"]
    assert annotations["description"]
    assert annotations["runbook_url"] == f"docs/runbook/{alert}.md"


def test_every_wait_has_its_reason() -> None:
    """R27: how long an alert waits is written with why."""
    waits = [line for path in RULES for line in path.read_text().splitlines() if line.lstrip().startswith("for:")]
    assert len(waits) == len(ALERTS)
    assert [line for line in waits if not re.search(r"for: \w+  # \S", line)] == []


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_has_its_page(alert: str) -> None:
    """R27: the page of an alert has a meaning, a diagnosis with queries, a resolution in steps, and a verification."""
    page = PAGES[alert]
    assert page.startswith(f"# {alert}\n\n**{ALERTS[alert]['labels']['severity']}**, ")
    sections = dict(re.findall(r"^## (.+)\n\n((?:(?!^## ).*\n)+)", page, re.MULTILINE))
    assert list(sections) == HEADINGS
    assert "```promql" in sections["Diagnosis"]
    assert "\n2. " in sections["Resolution"]


def test_there_is_no_page_without_an_alert() -> None:
    """R27: what no alert leads to is not read."""
    assert set(PAGES) == set(ALERTS)


def test_the_index_lists_every_alert() -> None:
    """R27: each once, with its severity and a line."""
    rows = re.findall(
        r"^\| \[(\w+)\]\((\w+)\.md\) \| (\w+) \| (.+) \|$", (RUNBOOK / "README.md").read_text(), re.MULTILINE
    )
    assert [(name, page, severity) for name, page, severity, _ in rows] == [
        (name, name, ALERTS[name]["labels"]["severity"]) for name, *_ in rows
    ]
    assert sorted(name for name, *_ in rows) == sorted(ALERTS)


def test_only_alerts_that_exist_are_routed() -> None:
    """R27: both severities have a receiver, and nothing is inhibited by an alert that is no more."""
    document = _yaml(PROMETHEUS / "alertmanager.yaml")
    receivers = {receiver["name"] for receiver in document["receivers"]}
    routes = [document["route"], *document["route"]["routes"]]
    assert {route["receiver"] for route in routes} == receivers
    named = re.findall(r"Penstock\w+", str(document["inhibit_rules"]))
    assert named
    assert set(named) <= set(ALERTS)


def _matches(matchers: list[str], labels: Mapping[str, str]) -> bool:
    parts = [re.fullmatch(r'(\w+)(=~?)"(.+)"', matcher) for matcher in matchers]
    return all(
        part and re.fullmatch(part[3] if part[2] == "=~" else re.escape(part[3]), labels[part[1]]) for part in parts
    )


def _inhibits(source: Mapping[str, str], target: Mapping[str, str]) -> bool:
    """Return true if Alertmanager inhibits *target* while *source* fires; missing labels are empty."""
    rules = _yaml(PROMETHEUS / "alertmanager.yaml")["inhibit_rules"]
    source_labels, target_labels = defaultdict(str, source), defaultdict(str, target)
    return any(
        _matches(rule["source_matchers"], source_labels)
        and _matches(rule["target_matchers"], target_labels)
        and all(source_labels[label] == target_labels[label] for label in rule.get("equal", []))
        for rule in rules
    )


def _alert(name: str, **labels: str) -> dict[str, str]:
    return {"alertname": f"Penstock{name}", **labels}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (_alert("RoleDown", role="query"), _alert("NotReady", role="query")),
        (_alert("DatabaseDown", component="database"), _alert("DependencyDown", component="database")),
        (_alert("DatabaseDown", component="refdata"), _alert("CommandsStalled")),
        (_alert("DatabaseDown", component="primary"), _alert("PodDataStale")),
        (_alert("CommandsStalled", topic="refdata.commands"), _alert("BusLag", topic="refdata.commands")),
        (_alert("HarvestPartitionsFailing"), _alert("DeadLetters", topic="harvest.work-items")),
        (_alert("HarvestRunFailed"), _alert("DeadLetters", topic="harvest.consolidations")),
        (_alert("ReadErrorBudgetFastBurn"), _alert("ReadErrorBudgetSlowBurn")),
    ],
)
def test_one_cause_is_one_call_within_an_installation(source: dict[str, str], target: dict[str, str]) -> None:
    """R27: an alert that follows from a firing cause is inhibited, but only in the same namespace."""
    assert _inhibits(source, target)
    assert _inhibits({**source, "namespace": "prod"}, {**target, "namespace": "prod"})
    assert not _inhibits({**source, "namespace": "staging"}, {**target, "namespace": "prod"})


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (_alert("DatabaseDown", component="database"), _alert("RoleDown", role="query")),
        (_alert("DatabaseDown", component="tracking"), _alert("PodDataStale")),
        (_alert("DatabaseDown", component="database"), _alert("DependencyDown", component="bus")),
        (_alert("CommandsStalled", topic="refdata.commands"), _alert("BusLag", topic="mdm.rates")),
        (_alert("HarvestRunFailed"), _alert("DeadLetters", topic="harvest.work-items")),
    ],
)
def test_an_alert_with_another_cause_is_not_inhibited(source: dict[str, str], target: dict[str, str]) -> None:
    """R27: an alert hides only what it explains."""
    assert not _inhibits(source, target)


def _commands(text: str) -> Iterator[str]:
    """Yield the commands of Penstock on a page: lines after a prompt, and text in backquotes."""
    blocks = re.findall(r"^( *)```(\w*)\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    typed = [line.strip()[2:] for _, _, body in blocks for line in body.splitlines() if line.strip().startswith("$ ")]
    prose = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    for source_labels in [*typed, *re.findall(r"`([^`]+)`", prose)]:
        yield from re.findall(r"(?:^|\s)penstock\s+(.+)", source_labels, re.DOTALL)


def _is_known(command: str) -> bool:
    """Whether the program has this command, with these options and so many arguments."""
    words = iter(shlex.split(command, comments=True))
    node: Any = PROGRAM
    given = 0
    for word in words:
        subcommands: Mapping[str, Any] = getattr(node, "commands", {})
        if subcommands:
            if word not in subcommands:
                return False
            node = subcommands[word]
        elif word in {">", "|"}:
            break
        elif word.startswith("-"):
            option = next((param for param in node.params if word in param.opts), None)
            if option is None or not (option.is_flag or next(words, None)):
                return False
        else:
            given += 1
    arguments = [param for param in node.params if param.param_type_name == "argument"]
    return not getattr(node, "commands", {}) and (
        given <= len(arguments) or any(argument.nargs < 0 for argument in arguments)
    )


@pytest.mark.parametrize("page", sorted(RUNBOOK.glob("*.md")), ids=lambda page: page.stem)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    """R27: every command on a runbook page is valid."""
    assert [command for command in _commands(page.read_text()) if not _is_known(command)] == []


@pytest.mark.parametrize("page", sorted(RUNBOOK.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_asks_only_what_answers(page: Path) -> None:
    """R27: no `/actuator` at the gateway, no address of a pod, no call without a token, no header by its capitals."""
    text = page.read_text()
    assert re.findall(r"URL/actuator|http://INSTANCE|--config penstock\.yaml|grep X-\S+", text) == []
    calls = [line for line in text.splitlines() if re.search(r"curl .*\$PENSTOCK_(QUERY_)?URL/", line)]
    assert [line for line in calls if "Authorization: Bearer $PENSTOCK_TOKEN" not in line] == []
    assert text.count("port-forward") or "127.0.0.1:180" not in text or "README.md#reaching-one-instance" in text


@pytest.mark.parametrize(
    "wrong", ["track whither f 1", "dict", "dict lag a b c", "track queue --depth 3", "doctor --config"]
)
def test_commands_that_do_not_exist_are_noticed(wrong: str) -> None:
    """R27: the check of the pages can fail."""
    assert not _is_known(wrong)
    assert list(_commands(f"```console\n$ penstock {wrong}\n```\n and `penstock {wrong}`")) == [wrong, wrong]
