"""R1, R27: how much is logged changes while a process runs: by a signal for one, by the file for all."""

import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from penstock.kernel.telemetry.log_level import LOG_LEVEL
from penstock.refdata.pod.memory.shared_counters import PodCounters
from penstock.refdata.pod.serve.main import apply_log_level
from tests.deploy.rolling.rolling_roles import INGEST, QUERY, TRACKING, RollingRole, configure, running
from tests.services.postgres import module_database
from tests.support.wait import until

ROLES = ("command-api", QUERY, "harvest", INGEST, TRACKING)
WITHOUT_A_POD = ("command-api", "harvest", INGEST, TRACKING)


@dataclass
class LogLevelHarness:
    """Roles that run on one file."""

    folder: Path
    url: str
    roles: dict[str, RollingRole]

    def write(self, level: str) -> None:
        configure(self.folder, self.url, telemetry={"log_level": level})

    @property
    def pod_state(self) -> PodCounters:
        [folder] = (self.folder / "memory").glob("penstock-pod-*")
        return PodCounters(folder)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LogLevelHarness]:
    folder = tmp_path_factory.mktemp("harness")
    with module_database() as url:
        configure(folder, url)
        with running(folder, *ROLES) as roles:
            yield LogLevelHarness(folder, url, roles)


def details(role: RollingRole) -> int:
    """Return the number of its DEBUG lines."""
    role.status("liveness")
    return sum(entry["level"] == "debug" for entry in role.logged("request_answered"))


def switch(role: RollingRole) -> str:
    """Send the signal; what the log level is from then on."""
    before = len(role.logged("log_level_changed"))
    os.kill(role.pid, signal.SIGUSR1)
    until(lambda: len(role.logged("log_level_changed")) > before, f"{role.name} says so")
    return str(role.logged("log_level_changed")[-1]["to"])


def reloaded(role: RollingRole) -> int:
    """Return how often a logger created at the start logged a reload."""
    return len(role.logged("configuration_reloaded"))


@pytest.mark.full
@pytest.mark.parametrize("name", WITHOUT_A_POD)
def test_a_signal_shows_details_and_hides_them(harness: LogLevelHarness, name: str) -> None:
    """R27: SIGUSR1 switches DEBUG on for one process, and off again."""
    role = harness.roles[name]
    assert details(role) == 0
    assert switch(role) == "DEBUG"
    until(lambda: details(role) > 0, "it tells more")
    assert switch(role) == "INFO"
    shown = details(role)
    assert details(role) == shown


@pytest.mark.full
def test_a_signal_reaches_the_serving_processes(harness: LogLevelHarness) -> None:
    """R27: those of a pod log as much as its loader; one that gets the signal itself goes on."""
    pod, state = harness.roles[QUERY], harness.pod_state
    until(lambda: state.log_level == logging.INFO, "the loader has changed the level")
    assert switch(pod) == "DEBUG"
    until(lambda: state.log_level == logging.DEBUG, "the loader tells")
    serving = psutil.Process(pod.pid).children()
    assert serving
    for process in serving:
        process.send_signal(signal.SIGUSR1)
    assert pod.get("/v1/tenants/acme/dictionaries/ONE/items/a").json() == 1
    assert psutil.Process(pod.pid).children() == serving
    assert switch(pod) == "INFO"
    until(lambda: state.log_level == logging.INFO, "the loader tells")
    state.close()


def test_a_serving_process_heeds_what_the_loader_says(tmp_path: Path) -> None:
    """R27: through shared memory; without a change a process keeps the level of its start."""
    root = logging.getLogger()
    before, state = root.level, PodCounters(tmp_path, create=True)
    try:
        LOG_LEVEL.configure("warning")
        apply_log_level(state)
        assert root.level == logging.WARNING
        for level in (logging.DEBUG, logging.ERROR):
            state.log_level = level
            apply_log_level(PodCounters(tmp_path))
            assert root.level == level
    finally:
        LOG_LEVEL.configure("info")
        root.setLevel(before)
        state.close()


@pytest.mark.full
def test_the_file_tells_all(harness: LogLevelHarness) -> None:
    """R1: telemetry.log_level is taken over while running, by loggers made long before; nothing is to be restarted."""
    state = harness.pod_state
    harness.write("WARNING")
    until(lambda: state.log_level == logging.WARNING, "the pod takes it over")
    for name in WITHOUT_A_POD:
        role = harness.roles[name]
        assert switch(role) == "DEBUG"
        before = reloaded(role)
        os.kill(role.pid, signal.SIGHUP)
        until(lambda role=role, before=before: reloaded(role) > before, f"{name} says that it read the file")  # type: ignore[misc]
        assert switch(role) == "WARNING"
    harness.write("DEBUG")
    for name in WITHOUT_A_POD:
        role, shown = harness.roles[name], details(harness.roles[name])
        until(lambda role=role, shown=shown: details(role) > shown + 1, f"{name} tells details")  # type: ignore[misc]
    until(lambda: state.log_level == logging.DEBUG, "the pod takes it over")
    harness.write("INFO")
    until(lambda: state.log_level == logging.INFO, "the pod takes it over")
    assert [name for name, role in harness.roles.items() if role.logged("restart_needed")] == []
    state.close()


@pytest.mark.full
def test_an_invalid_file_is_refused_and_reported(harness: LogLevelHarness) -> None:
    """R1: the metric is 1 while the file is invalid and the previous one is effective; 0 after a correction."""
    for role in harness.roles.values():
        assert role.metric("penstock_config_invalid") == 0
    (harness.folder / "penstock.yaml").write_text("telemetry: {log_level: loud}")
    for role in harness.roles.values():
        until(lambda role=role: role.metric("penstock_config_invalid") == 1, f"{role.name} refuses it")  # type: ignore[misc]
        assert role.logged("configuration_refused")[-1]["code"]
        assert role.status("readiness") == 200
    harness.write("INFO")
    for role in harness.roles.values():
        until(lambda role=role: role.metric("penstock_config_invalid") == 0, f"{role.name} takes it")  # type: ignore[misc]
