"""Receivers of deliveries for tests: a webhook server, a dictionary, and flows."""

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple, Self
from uuid import uuid4

import httpx

from penstock.ingest.model import DeliveryResult
from tests.ingest.harness import IngestHarness, snapshot
from tests.support.processes import Up
from tests.support.types import Json
from tests.support.wait import until

ONE, TWO, THREE = (snapshot({"A": price, "B": 2}) for price in (1, 2, 3))
FLOW, OTHER_FLOW = "after-prices", "also-after-prices"


class WebhookCall(NamedTuple):
    """A call that the server received."""

    path: str
    headers: dict[str, str]
    body: bytes


class WebhookServer(AbstractContextManager["WebhookServer"]):
    """A receiver of webhooks. It answers with the statuses *answers*, one per call, and then with 204."""

    def __init__(self, *answers: int) -> None:
        self.calls: list[WebhookCall] = []
        self.answers = list(answers)
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"] or 0))
                hook.calls.append(
                    WebhookCall(self.path, {name.lower(): text for name, text in self.headers.items()}, body)
                )
                self.send_response(hook.answers.pop(0) if hook.answers else 204)
                self.send_header("location", "/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                self.do_POST()

            def log_message(self, *_: Any) -> None:
                """Log nothing: the calls are stored."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)


Deliver = Callable[[], dict[str, DeliveryResult]]


def statuses(results: Mapping[str, DeliveryResult]) -> dict[str, str]:
    """Return the status of each delivery by target."""
    return {target: result.status.value for target, result in results.items()}


class Dictionary:
    """The dictionary PRICES of a tenant that no other test uses."""

    def __init__(self, up: Up) -> None:
        self.tenant = f"t{uuid4().hex[:8]}"
        self._up = up
        self.target = {"dictionary": {"tenant": self.tenant, "code": "PRICES", "url": up.api}}
        self.name = f"dictionary {self.tenant}/PRICES at {up.api}"

    @property
    def versions(self) -> list[Json]:
        """The committed versions, newest first."""
        history = httpx.get(f"{self._up.api}/v1/tenants/{self.tenant}/history/PRICES").json()
        versions: list[Json] = history["versions"]
        return versions

    def read_items(self) -> dict[str, Any]:
        """Return the items that a pod serves."""
        response = httpx.get(f"{self._up.query}/v1/tenants/{self.tenant}/dictionaries/PRICES/all")
        if response.status_code != 200:
            return {}
        return {item["key"]: item["value"] for item in response.json()["items"]}

    def wait_items(self, expected: dict[str, Any]) -> None:
        until(lambda: self.read_items() == expected, f"the pod has {len(expected)} items", within=15)


def read_payloads(harness: IngestHarness) -> dict[str, Any]:
    return {fact["payload"]["sku"]: fact["payload"] for fact in harness.facts()}


def list_started(up: Up, run_id: str, flow: str = FLOW) -> list[Json]:
    """Return the runs of a flow that a run of ingest has started."""
    runs = httpx.get(f"{up.api}/api/v1/flow_runs", params={"flow": flow, "limit": 100}).json()["runs"]
    details = [httpx.get(f"{up.api}/api/v1/flow_runs/{run['runId']}").json() for run in runs]
    return [run for run in details if run["scope"]["runId"] == run_id]
