"""The VirtualService's routes in a real Envoy, before servers that tell which role they stand for."""

import json
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx

from tests.deploy.kubernetes.istio_routes import of_kind
from tests.support.ports import free_port
from tests.support.require import require
from tests.support.types import Json
from tests.support.wait import until

BINARY = Path(__file__).parents[3] / ".build" / "tools" / "bin" / "envoy-1.39.3"
BREAKS = "x-break"  # asks a server to close the connection in place of an answer
_EXTENSION = "type.googleapis.com/envoy.extensions.filters"


@dataclass
class StubRole:
    """A server in place of a role, with the number of failures requested from it."""

    name: str
    broken: int = 0
    port: int = 0

    @contextmanager
    def serving(self) -> Iterator[None]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.port = server.server_address[1]
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        role = self

        class Handler(BaseHTTPRequestHandler):
            def do(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                if BREAKS in self.headers:
                    role.broken += 1
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.send_response(204)
                self.send_header("x-role", role.name)
                self.send_header("x-within", self.headers.get("x-envoy-expected-rq-timeout-ms", "ever"))
                self.end_headers()

            do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do  # noqa: N815 - as http.server calls them

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as it is overridden
                pass

        return Handler


@dataclass
class Envoy:
    """Where it listens, and the servers behind it by their hosts."""

    url: str
    roles: Mapping[str, StubRole] = field(default_factory=dict)


@contextmanager
def envoy(folder: Path) -> Iterator[Envoy]:
    """A running one, with the routes of deploy/istio."""
    if not BINARY.exists():
        require("envoy", "there is no Envoy here: scripts/deploy-tools brings one")
    [service] = of_kind("VirtualService")
    routes = service["spec"]["http"]
    hosts = sorted({to["destination"]["host"] for found in routes for to in found.get("route", ())})
    roles = {host: StubRole(host.partition(".")[0].removeprefix("penstock-")) for host in hosts}
    with ExitStack() as stack:
        for role in roles.values():
            stack.enter_context(role.serving())
        port = free_port()
        (folder / "envoy.json").write_text(json.dumps(_bootstrap(port, routes, roles)))
        log = stack.enter_context((folder / "envoy.log").open("wb"))
        command = [
            str(BINARY),
            "-c",
            str(folder / "envoy.json"),
            "--disable-hot-restart",
            "--concurrency",
            "1",
            "-l",
            "error",
        ]
        process = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
        stack.callback(process.terminate)
        made = Envoy(f"http://127.0.0.1:{port}", roles)
        until(lambda: _answers(made.url, process), f"Envoy does not answer; see {folder}/envoy.log")
        yield made


def _answers(url: str, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None, "Envoy refuses the routes"
    try:
        return httpx.get(f"{url}/actuator").status_code == 404
    except httpx.TransportError:
        return False


def _bootstrap(port: int, routes: list[Json], roles: Mapping[str, StubRole]) -> Json:
    manager = {
        "@type": f"{_EXTENSION}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "penstock",
        "normalize_path": True,  # as Istio's default, BASE
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": _routes(routes)}]},
        "http_filters": [
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{_EXTENSION}.http.router.v3.Router"}}
        ],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    listener = {"name": "in", "address": _address(port), "filter_chains": [{"filters": filters}]}
    return {"static_resources": {"listeners": [listener], "clusters": [_cluster(*role) for role in roles.items()]}}


def _routes(routes: list[Json]) -> list[Json]:
    """One of Envoy's for each match, as istiod writes them."""
    return [{"match": _match(match), **_action(found)} for found in routes for match in found["match"]]


def _match(match: Json) -> Json:
    [(how, value)] = match["uri"].items()
    made: dict[str, Any] = {"safe_regex": {"regex": value}} if how == "regex" else {how: value}
    if "method" in match:
        wanted = {"safe_regex": {"regex": match["method"]["regex"]}}
        made["headers"] = [{"name": ":method", "string_match": wanted}]
    return made


def _action(found: Json) -> Json:
    if "directResponse" in found:
        return {"direct_response": {"status": found["directResponse"]["status"]}}
    [to] = found["route"]
    action: dict[str, Any] = {"cluster": to["destination"]["host"], "timeout": found.get("timeout", "0s")}
    retries = found["retries"]
    if retries["attempts"]:
        action["retry_policy"] = {"num_retries": retries["attempts"], "retry_on": retries["retryOn"]}
        if "perTryTimeout" in retries:
            action["retry_policy"]["per_try_timeout"] = retries["perTryTimeout"]
    return {"route": action}


def _cluster(host: str, role: StubRole) -> Json:
    endpoint = {"endpoint": {"address": _address(role.port)}}
    assignment = {"cluster_name": host, "endpoints": [{"lb_endpoints": [endpoint]}]}
    return {"name": host, "connect_timeout": "1s", "type": "STATIC", "load_assignment": assignment}


def _address(port: int) -> Json:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
