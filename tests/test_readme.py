"""The examples of the README work: they are executed in their order."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from penstock.settings import load_settings
from tests.harvest.simulator_process import SimulatorProcess
from tests.support.processes import Up

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SOURCE, API, QUERY = "http://127.0.0.1:8090", "http://127.0.0.1:8080", "http://127.0.0.1:8081"
TEN = 10


def blocks(language: str) -> list[str]:
    """The blocks of the five parts, in their order."""
    (section,) = re.findall(r"^## Five parts.*?(?=^## )", README, re.MULTILINE | re.DOTALL)
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


CONFIG, FLOW = blocks("yaml")
(WRITE_AND_READ, SPLIT), (START, INGEST, HARVEST, TRACK, RUN) = blocks("python"), blocks("console")


class ReadmeReader:
    """A user who types the commands of the README in an empty folder."""

    def __init__(self, up: Up, folder: Path, source: SimulatorProcess) -> None:
        self._folder = folder
        self._addresses = {API: up.api, QUERY: up.query, SOURCE: source.url}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._env = {**os.environ, "PATH": path, "PENSTOCK_URL": up.api, "PENSTOCK_QUERY_URL": up.query}

    def run(self, command: list[str]) -> tuple[int, str]:
        done = subprocess.run(
            command, cwd=self._folder, env=self._env, capture_output=True, text=True, timeout=60, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout + done.stderr

    def python(self, code: str) -> str:
        status, out = self.run([sys.executable, "-c", self._here(code)])
        assert status == 0, out
        return out

    def type(self, block: str) -> list[str]:
        """What each command of a console block prints; all of them succeed."""
        outputs = []
        for line in re.findall(r"^\$ (.+?)(?:  +#.*)?$", block, re.MULTILINE):
            status, out = self.run(["bash", "-c", self._here(line)])
            assert status == 0, (line, out)
            outputs.append(out)
        return outputs

    def _here(self, text: str) -> str:
        for shown, real in self._addresses.items():
            text = text.replace(shown, real)
        return text


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReadmeReader]:
    folder = tmp_path_factory.mktemp("reader")
    source = SimulatorProcess(3000)
    (folder / "penstock.yaml").write_text(CONFIG.replace(SOURCE, source.url))
    (folder / "flows").mkdir()
    (folder / "flows" / "nightly.yaml").write_text(FLOW)
    with Up(folder) as up:
        yield ReadmeReader(up, folder, source)
    source.stop()


def test_each_example_has_ten_lines() -> None:
    """The introduction is short."""
    for block in (WRITE_AND_READ, INGEST, HARVEST, SPLIT, TRACK, FLOW, RUN):
        lines = [line for line in block.splitlines() if line.strip()]
        assert len(lines) <= TEN, block


@pytest.mark.full
def test_refdata(reader: ReadmeReader) -> None:
    """R31: what was written is read back at its version."""
    assert reader.python(WRITE_AND_READ) == "1 {'rate': '1.0851'}\n"


@pytest.mark.full
def test_ingest(reader: ReadmeReader) -> None:
    """I17: what `inspect` proposes is good enough to publish the file."""
    *_, ran, fact, status = reader.type(INGEST)
    assert ran.startswith("PASS  azimut_")
    assert '"payload":' in fact
    assert "azimut" in status


@pytest.mark.full
def test_harvest(reader: ReadmeReader) -> None:
    """H13, R2: a feed becomes a dictionary by configuration."""
    ran, item, history = reader.type("\n".join(HARVEST.splitlines()[1:]))
    assert ran.startswith("completed")
    assert "shape" in item
    assert "harvest stones" in history


@pytest.mark.full
def test_tracking_and_flows(reader: ReadmeReader) -> None:
    """T18, F14: a daemon takes what was registered; a flow waits for it, harvests, and publishes."""
    registered, _, why = reader.type(TRACK)
    assert registered == "orders-17: registered\n"
    assert "waiting for a worker of shard-splitter" in why
    assert reader.python(SPLIT).splitlines() == [f"splitting orders-17 {shard} attempt 1" for shard in (0, 1)]
    ran, shown, status, events = reader.type(RUN)
    assert "SUCCEEDED" in ran
    assert "refdata.publish" in shown
    assert "no problems" in status
    assert len(events.splitlines()) == 5


def test_it_starts_as_shown() -> None:
    """The command above the examples is the one they need."""
    assert START == "$ penstock up\n"


def test_the_way_to_a_cluster_is_configuration(tmp_path: Path) -> None:
    """The example of a larger set-up is valid, and names every port of the platform."""
    (block,) = re.findall(r"^## From one machine.*?```yaml\n(.*?)```", README, re.MULTILINE | re.DOTALL)
    (tmp_path / "penstock.yaml").write_text(block)
    settings = load_settings(tmp_path / "penstock.yaml", {})
    assert settings.bus.kafka
    assert settings.signals.redis
    assert set(YAML(typ="safe").load(block)) == {"database", "bus", "signals", "storage", "auth", "server"}
