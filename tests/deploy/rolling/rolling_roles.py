"""Every role as a process, and what its probes, its metrics and its log say."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.harvest.stepper import feed
from tests.support.ports import free_port
from tests.support.processes import PENSTOCK, Server
from tests.support.settings import write_config
from tests.support.types import Json
from tests.support.wait import until

API, QUERY, FLOWS, INGEST, TRACKING = "api", "query", "flows", "ingest", "pipeline-apid"
_PATIENCE = 30.0
AT_MOST = 120.0  # seconds; on a busy machine eight programs start slowly
COMMANDS = {
    API: [PENSTOCK, "serve", "api"],
    "command-api": [PENSTOCK, "serve", "command-api"],
    QUERY: [PENSTOCK, "serve", "query-api"],
    "apply": [PENSTOCK, "work", "apply"],
    "relay": [PENSTOCK, "work", "relay"],
    "harvest": [PENSTOCK, "work", "harvest"],
    FLOWS: [PENSTOCK, "work", "flows"],
    INGEST: [PENSTOCK, "ingest", "watch"],
    TRACKING: ["penstock.cli.pipeline_apid"],
}
ONE = {"code": "ONE", "loadSql": "select 'a' as k, '1'::jsonb as v where :tenantId <> ''"}


class RollingRole(Server):
    """One role on a port of its own, not waited for."""

    def __init__(self, name: str, folder: Path, *, in_new_interpreter: bool) -> None:
        self.address = f"http://127.0.0.1:{(port := free_port())}"
        super().__init__(
            name, [*COMMANDS[name], "--port", str(port), "--json"], folder, in_new_interpreter=in_new_interpreter
        )
        self.name = name

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.address}{path}", timeout=_PATIENCE)

    def status(self, probe: str) -> int:
        """Return the status of a probe; 0 without a response."""
        try:
            return self.get(f"/actuator/health/{probe}").status_code
        except httpx.TransportError:
            return 0

    def becomes_ready(self, *, is_ready: bool = True) -> None:
        wanted = 200 if is_ready else 503
        until(lambda: self.status("readiness") == wanted, f"{self.name} answers {wanted}", within=AT_MOST)
        assert self.status("liveness") == 200, self.name

    def logged(self, event: str) -> list[Json]:
        """The lines of its log that tell of *event*."""
        lines = self.log_file.read_text().split("\n")[:-1]
        return [entry for line in lines if line.startswith("{") and (entry := json.loads(line))["event"] == event]

    def metric(self, name: str, **labels: str) -> float:
        text = self.get("/actuator/prometheus").text
        families = text_string_to_metric_families(text)
        [value] = [
            sample.value
            for family in families
            for sample in family.samples
            if (sample.name, sample.labels) == (name, labels)
        ]
        return value

    def tells(self, component: str, *, is_up: bool) -> bool:
        return self.metric("penstock_component_up", component=component) == is_up


@contextmanager
def running(
    folder: Path, *names: str, waits: bool = True, in_new_interpreter: bool = False
) -> Iterator[dict[str, RollingRole]]:
    """Yield roles that were started concurrently, ready if the caller *waits*; they end afterwards."""
    with ExitStack() as stack:
        roles = {}
        for name in names:
            role = roles[name] = RollingRole(name, folder, in_new_interpreter=in_new_interpreter)
            stack.push(role.__exit__)
        for role in roles.values() if waits else ():
            role.__enter__()
        yield roles


def configure(folder: Path, url: str, **more: Json) -> None:
    """A configuration that serves every role, written as a whole."""
    (folder / "root" / "etl_data").mkdir(parents=True, exist_ok=True)
    query = {"reconcileEvery": "PT0.2S", "memoryDir": str(folder / "memory")}
    config = {
        "database": {"url": url},
        "refdata": {"dictionaries": [ONE], "tenants": ["acme"], "query": query},
        "harvest": {"feeds": {"stones": feed("http://127.0.0.1:9")}},
        "flows": {"python": ["json"]},
        "ingest": {"root": str(folder / "root")},
        **more,
    }
    write_config(folder, config)
