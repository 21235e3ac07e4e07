"""The simulator in a separate process: `penstock harvest source`."""

import json
import subprocess
import sys
from typing import Any

import httpx

COMMAND = [sys.executable, "-m", "penstock.cli.main"]
RECORDS = 400


class SimulatorProcess:
    """A process of `penstock harvest source`."""

    def __init__(self, records: int = RECORDS, *options: str) -> None:
        arguments = ["harvest", "source", "--records", str(records), "--port", "0", "--json", *options]
        self._process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.url = json.loads(self._process.stdout.readline())["api"]

    def fail(self, **faults: Any) -> None:
        """Apply *faults* from now on."""
        httpx.post(f"{self.url}/admin/faults", json=faults).raise_for_status()

    def change(self, **changes: Any) -> None:
        httpx.post(f"{self.url}/admin/changes", json=changes).raise_for_status()

    def pages(self) -> int:
        """Return the number of requested pages."""
        requests = httpx.get(f"{self.url}/admin/stats").json()["requests"]
        return sum(number for kind, number in requests.items() if kind in ("page", "diamonds"))

    def keys(self) -> set[str]:
        lines = httpx.get(f"{self.url}/admin/records").text.splitlines()
        return {json.loads(line)["id"] for line in lines}

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        if self._process.stdout:
            self._process.stdout.close()
