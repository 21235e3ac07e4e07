"""R27: a real Prometheus with our rules: no alert without a fault, and an alert for each fault until it is fixed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.deploy.monitoring import deployment
from tests.deploy.monitoring.delivered_queries import of_dashboards
from tests.deploy.monitoring.prometheus_server import PostgresProxyThread, Prometheus, prometheus
from tests.deploy.monitoring.promql import metrics_of
from tests.ingest.harness import snapshot
from tests.support.processes import Up
from tests.support.wait import until

_WITHIN = 90.0  # seconds: gauges are set every five or ten, and the machine may be busy
# The first counts what failed in a quarter of an hour; the second sees for ten minutes what waited for the broken view.
_REMEMBERED = {"PenstockReloadErrors", "PenstockFreshnessDegraded"}
# Series that begin with the first trouble of their kind.
_IN_TROUBLE = {
    "ALERTS",
    "cache_reload_errors_total",
    "penstock_harvest_failures_total",
    "penstock_refdata_drifts_total",
    "penstock_refdata_history_resets_total",
    "postgres_fallback_reads_total",
}
# Panels of trouble, of slopes over minutes, and of shares of what is not being done just now.
_LATER = {
    "penstock-tracking: Finished rows",
    "penstock-ingest: Alerts",
    "penstock-ingest: Failed runs by reason",
    "penstock-harvest: Rejected records",
}


@dataclass
class MonitoringHarness:
    """All parts in one process, the relay once more in its own, and who watches them."""

    site: deployment.Deployment
    up: Up
    relay: deployment.DeploymentRole
    proxy: PostgresProxyThread
    url: str
    prometheus: Prometheus

    def fires(self, alert: str) -> bool:
        return alert in self.prometheus.firing()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[MonitoringHarness]:
    """Driven until every part has something to show, then watched."""
    with ExitStack() as stack:
        url = stack.enter_context(deployment.database())
        proxy = stack.enter_context(PostgresProxyThread(url))
        monitored = deployment.Deployment(tmp_path, proxy.url, stack.enter_context(deployment.source()))
        up, relay = (
            stack.push(Up(tmp_path, env=deployment.NO_CHECKOUT)),
            stack.push(deployment.DeploymentRole(tmp_path, "relay")),
        )
        for process in (up, relay):
            process.__enter__()
        deployment.harvest(up.api)
        deployment.move(monitored, up.api, up.query)
        deployment.shows(up.api, *_SHOWN)
        targets = {"everything": up.api, "relay": relay.api}
        watching = stack.enter_context(prometheus(_folder(tmp_path), targets))
        found = MonitoringHarness(monitored, up, relay, proxy, url, watching)
        yield found
        found.relay.__exit__(None, None, None)


_SHOWN = (
    "penstock_flow_oldest_ready_step_seconds",
    "penstock_flow_steps_total",
    "penstock_harvest_watermark_seconds",
    "penstock_ingest_state_age_seconds",
    "penstock_refdata_audits_total",
)


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "prometheus"
    folder.mkdir()
    return folder


@pytest.mark.full
@pytest.mark.timeout(400)
def test_alerts_tell_of_what_is_broken_and_of_nothing_else(harness: MonitoringHarness) -> None:
    """R27: without a fault no alert fires and every panel has data; each fault fires its alert until it is fixed."""
    watching = harness.prometheus
    watching.looked(4)
    until(lambda: watching.unwell() == [], "every rule is evaluated")
    assert watching.firing() == {}
    assert _without_data(watching) == set()
    _break_and_fix(harness, _PARTS)
    _break_and_fix(harness, _PLATFORM)
    until(lambda: set(watching.firing()) <= _REMEMBERED, f"{set(watching.firing())} is over", _WITHIN)


def _without_data(watching: Prometheus) -> set[str]:
    """Panels that are empty and should not be."""
    empty = set()
    for of_dashboard in of_dashboards():
        found = watching.query(of_dashboard.query)
        if not found and not metrics_of(of_dashboard.query) & _IN_TROUBLE:
            empty.add(of_dashboard.place)
    return empty - _LATER


@dataclass(frozen=True)
class Fault:
    """What is done to a running Penstock, and how it is set right again."""

    breaks: Callable[[MonitoringHarness], None]
    fixes: Callable[[MonitoringHarness], None]


def _break_and_fix(harness: MonitoringHarness, faults: dict[str, Fault]) -> None:
    for fault in faults.values():
        fault.breaks(harness)
    for alert in faults:
        until(lambda alert=alert: harness.fires(alert), f"{alert} fires", _WITHIN)  # type: ignore[misc]
    for fault in faults.values():
        fault.fixes(harness)
    for alert in faults:
        until(lambda alert=alert: not harness.fires(alert), f"{alert} is over", _WITHIN)  # type: ignore[misc]


def _restart_relay(harness: MonitoringHarness) -> None:
    harness.relay = deployment.DeploymentRole(harness.site.folder, "relay", harness.relay.port)
    harness.relay.__enter__()


def _age_the_step(harness: MonitoringHarness) -> None:
    deployment.execute(harness.url, "UPDATE flow_step SET due_at = due_at - interval '1 hour' WHERE status = 'READY'")


def _do_the_step(harness: MonitoringHarness) -> None:
    """As a worker of its kind would."""
    steps = f"{harness.up.api}/api/v1/flow_steps"
    claimed = httpx.post(
        f"{steps}/claim", json={"worker": "w", "kinds": [deployment.UNCLAIMED_KIND], "limit": 1}, timeout=30
    )
    (item,) = claimed.json()["items"]
    path = f"{harness.up.api}/api/v1/flow_runs/{item['runId']}/steps/{item['stepId']}/report"
    httpx.post(path, json={"fence": item["fence"], "status": "SUCCEEDED"}, timeout=30).raise_for_status()


def _leave_a_row(harness: MonitoringHarness) -> None:
    deployment.queue_up(harness.up.api, _SECOND_FILE)
    deployment.execute(harness.url, "UPDATE pipeline_tracking SET created_at = created_at - interval '40 minutes'")


def _lose_a_view(harness: MonitoringHarness) -> None:
    deployment.execute(harness.url, "ALTER VIEW countries RENAME TO away")
    deployment.put(harness.up.api, deployment.THEIRS, "SE", "Sweden")


_SECOND_FILE = "20250101000001"
_PARTS = {
    "PenstockInstanceDown": Fault(lambda harness: harness.relay.kill(), _restart_relay),
    "PenstockTrackingStalled": Fault(
        lambda harness: _leave_a_row(harness), lambda harness: deployment.carry(harness.up.api, _SECOND_FILE)
    ),
    "PenstockIngestRunsFailing": Fault(
        lambda harness: _drop(harness, {"A": "none", "B": "none"}), lambda harness: _drop(harness, {"A": 3, "B": 4})
    ),
    "PenstockFlowStepsStalled": Fault(_age_the_step, _do_the_step),
    "PenstockPodVersionLag": Fault(
        _lose_a_view, lambda harness: deployment.execute(harness.url, "ALTER VIEW away RENAME TO countries")
    ),
}
# Apart: whatever a process starts meanwhile, a run of ingest for one, would read the broken file.
_PLATFORM = {
    "PenstockConfigInvalid": Fault(
        lambda harness: harness.site.configure("server: [1\n"),
        lambda harness: harness.site.configure(harness.site.config),
    ),
    "PenstockDatabaseDown": Fault(lambda harness: harness.proxy.shut(), lambda harness: harness.proxy.open()),
    "PenstockNotReady": Fault(lambda _: None, lambda _: None),
}


def _drop(harness: MonitoringHarness, prices: dict[str, object]) -> None:
    harness.site.harness.drop(snapshot(prices))
