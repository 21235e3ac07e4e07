"""A real Prometheus with short intervals and our rules, and a PostgreSQL that can be taken away."""

import asyncio
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from ruamel.yaml import YAML

from tests.deploy.monitoring.delivered_queries import RULES
from tests.services.postgres_proxy import PostgresProxy
from tests.support.ports import free_port
from tests.support.require import require
from tests.support.types import Json
from tests.support.wait import until

LOOK = 5  # seconds between two looks, and for one: a process without its database takes three to answer
ALERT_DELAY = 3  # seconds that replace every longer `for:`
_WAITS = re.compile(r"^(\s+for: )\d+[mhd]\b", re.MULTILINE)


class Prometheus:
    """Its API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, query: str) -> list[Json]:
        """What it answers now; every query of ours must be one it understands."""
        found: list[Json] = self._asked(f"query?{urlencode({'query': query})}")["result"]
        return found

    def firing(self) -> dict[str, list[Json]]:
        """The alerts that fire, by name: the labels of each."""
        found: dict[str, list[Json]] = {}
        for alert in self._asked("alerts")["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert["labels"])
        return found

    def unwell(self) -> list[str]:
        """Rules that could not be evaluated, or have not been yet."""
        rules = [rule for group in self._asked("rules")["groups"] for rule in group["rules"]]
        assert rules
        return [
            f"{rule['name']}: {rule.get('lastError') or rule['health']}" for rule in rules if rule["health"] != "ok"
        ]

    def looked(self, times: int) -> None:
        """Back once every target was looked at so often."""
        until(lambda: all(n >= times for n in self._looks()), f"{times} looks at each", within=60)

    def _asked(self, path: str) -> Json:
        with urlopen(f"{self.url}/api/v1/{path}", timeout=30) as answer:
            found: Json = json.load(answer)["data"]
        return found

    def _looks(self) -> list[float]:
        return [float(sample["value"][1]) for sample in self.query('count_over_time(up{job="penstock"}[1h])')] or [0]


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, str]) -> Iterator[Prometheus]:
    """One that scrapes *targets*, addresses by role, and knows all rules; they wait for seconds, not minutes."""
    binary = shutil.which("prometheus")
    if binary is None:
        require("prometheus")
    _write_rules(folder / "rules")
    jobs = [
        {"targets": [address.removeprefix("http://")], "labels": {"role": role}} for role, address in targets.items()
    ]
    config = {
        "global": {"scrape_interval": f"{LOOK}s", "scrape_timeout": f"{LOOK}s", "evaluation_interval": "500ms"},
        "rule_files": ["rules/*.yaml"],
        "scrape_configs": [
            {"job_name": "penstock", "metrics_path": "/actuator/prometheus", "static_configs": jobs},
        ],
    }
    with (folder / "prometheus.yaml").open("w") as file:
        YAML().dump(config, file)
    port = free_port()
    command = [binary, "--config.file=prometheus.yaml", "--storage.tsdb.path=series", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], cwd=folder, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: _is_ready(url, process, folder / "prometheus.log"), "Prometheus is not ready")
            yield Prometheus(url)
        finally:
            process.kill()
            process.wait(30)


def _write_rules(folder: Path) -> None:
    folder.mkdir()
    for file in RULES.glob("*.yaml"):
        (folder / file.name).write_text(_WAITS.sub(rf"\g<1>{ALERT_DELAY}s", file.read_text()))


def _is_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        with urlopen(f"{url}/-/ready", timeout=5):
            return True
    except URLError:
        return False


class PostgresProxyThread:
    """A proxy of PostgreSQL in its own thread, so that its users may block."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._gate = PostgresProxy(url)
        self.url = self._gate.url

    def __enter__(self) -> "PostgresProxyThread":
        self._thread.start()
        self._do(self._gate.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._gate.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def shut(self) -> None:
        self._do(self._gate.shut())

    def open(self) -> None:
        self._do(self._gate.open())

    def _do(self, what: Any) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(30)
