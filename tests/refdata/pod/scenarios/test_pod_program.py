"""R17, R23, R29: a pod as a program: processes with one copy of the data, and the death of each of them."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.refdata.harness import upsert
from tests.support.http import answered, commit_update
from tests.support.processes import QueryApi, Up, penstock
from tests.support.settings import write_config
from tests.support.types import Json
from tests.support.wait import until

MANY = 100_000
BIG = {
    "code": "BIG",
    "loadSql": "select i::text as k, jsonb_build_object('n', i, 'text', repeat('x', 200)) as v "
    f"from generate_series(1, {MANY}) i where :tenantId = 'acme'",
}
LITTLE = {"code": "LITTLE"}
ONE = {"code": "ONE", "loadSql": "select 'a' as k, '1'::jsonb as v where :tenantId <> ''"}
OTHER_ONE = {**ONE, "loadSql": "select 'a' as k, '2'::jsonb as v where :tenantId <> ''"}


class PodProgramHarness:
    """A folder with a configuration and the memory of a pod."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url, self.memory = folder, url, folder / "memory"

    def write(self, *known: Json, **query: Any) -> None:
        section = {"reconcileEvery": "PT0.2S", "auditEvery": None, "memoryDir": str(self.memory), **query}
        refdata = {"dictionaries": known, "tenants": ["acme"], "query": section}
        write_config(self.folder, {"database": {"url": self.url}, "refdata": refdata})

    def pods(self) -> list[Path]:
        return sorted(self.memory.glob("penstock-pod-*"))

    def logged(self, server: QueryApi, event: str) -> list[Json]:
        lines = server.log_file.read_text().split("\n")[:-1]
        return [result for line in lines if line.startswith("{") and (result := json.loads(line))["event"] == event]


@pytest.fixture
def harness(tmp_path: Path, database_url: str) -> PodProgramHarness:
    return PodProgramHarness(tmp_path, database_url)


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=30, headers={"Connection": "close"}) as client:
        yield client


def at(address: str, path: str) -> str:
    return f"{address}/v1/tenants/acme/dictionaries/{path}"


def counted(client: httpx.Client, pod: QueryApi) -> float:
    """Return the number of successful responses of all processes."""
    text = client.get(f"{pod.api}/actuator/prometheus").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    named = [
        sample
        for sample in samples
        if sample.name == "penstock_query_requests_total" and sample.labels["status"] == "2xx"
    ]
    return named[0].value


def own_memory(pid: int) -> int:
    """Return the private memory of a process in bytes, without the shared memory of the pod."""
    return sum(mapped.private_dirty for mapped in psutil.Process(pid).memory_maps(grouped=False))


def connections(pid: int) -> int:
    return sum(
        net_connection.status == psutil.CONN_ESTABLISHED
        for net_connection in psutil.Process(pid).net_connections("tcp")
    )


@pytest.mark.full
def test_processes_share_one_copy(harness: PodProgramHarness, client: httpx.Client) -> None:
    """R29: both processes serve from one memory, and reading all items needs no private copy."""
    harness.write(BIG)
    with QueryApi(harness.folder, "--processes", "2") as pod, ExitStack() as stack:
        (folder,) = harness.pods()
        size = (folder / "items").stat().st_blocks * 512
        assert size > MANY * 200
        assert len(pod.serving_pids) == 2
        before = {pid: own_memory(pid) for pid in pod.serving_pids}
        while not all(connections(pid) for pid in pod.serving_pids):
            client = stack.enter_context(httpx.Client(timeout=30))
            answer = client.get(at(pod.api, "BIG/all"), headers={"Accept": "application/x-ndjson"})
            assert answer.text.count("\n") == MANY
            assert client.get(at(pod.api, f"BIG/items/{MANY}")).json()["n"] == MANY
        for pid in pod.serving_pids:
            assert own_memory(pid) - before[pid] < size / 4
        assert harness.pods() == [folder]


def test_a_serving_process_that_dies_is_replaced(harness: PodProgramHarness, client: httpx.Client) -> None:
    """R17: after kill -9 of one of two processes every request is answered, it is replaced, and counters only grow."""
    harness.write(ONE)
    with QueryApi(harness.folder, "--processes", "2") as pod:
        for _ in range(10):
            assert client.get(at(pod.api, "ONE/items/a")).json() == 1
        first, other = pod.serving_pids
        before = counted(client, pod)
        assert before >= 10
        os.kill(first, signal.SIGKILL)
        for _ in range(20):
            assert client.get(at(pod.api, "ONE/items/a")).json() == 1
        until(lambda: len({*pod.serving_pids} - {first}) == 2, "another process")
        assert other in pod.serving_pids
        until(lambda: counted(client, pod) >= before + 20, "all are counted")
        assert [result["exit_code"] for result in harness.logged(pod, "serving_process_died")] == [-signal.SIGKILL]
        assert pod.stop() == 0


@pytest.mark.full
def test_serving_processes_end_with_the_loader(harness: PodProgramHarness, client: httpx.Client) -> None:
    """R23, R29: after kill -9 of the loader its serving processes end, and the next start removes the folder."""
    harness.write(ONE)
    with QueryApi(harness.folder, "--processes", "2") as pod, httpx.Client() as idle:
        assert idle.get(at(pod.api, "ONE/items/a")).status_code == 200
        serving = pod.serving_pids
        pod.kill()
        until(lambda: not any(psutil.pid_exists(pid) for pid in serving), "they end", within=10)
    (left,) = harness.pods()
    with QueryApi(harness.folder) as pod:
        assert client.get(at(pod.api, "ONE/items/a")).json() == 1
        assert len(harness.pods()) == 1
        assert left not in harness.pods()
        assert pod.stop() == 0
    assert harness.pods() == []


@pytest.mark.full
def test_a_stop_lets_readers_finish(harness: PodProgramHarness) -> None:
    """R17: after SIGTERM a slow reader gets its complete stream, and nothing remains of the pod."""
    harness.write(BIG)
    with QueryApi(harness.folder) as pod:
        accept = {"Accept": "application/x-ndjson"}
        with httpx.Client(timeout=30) as client, client.stream("GET", at(pod.api, "BIG/all"), headers=accept) as answer:
            lines = answer.iter_lines()
            assert json.loads(next(lines))["value"]["text"] == "x" * 200
            psutil.Process(pod.pid).terminate()
            until(lambda: bool(harness.logged(pod, "stopping")), "it stops")
            assert sum(1 for _ in lines) == MANY - 1
        assert pod.ended() == 0
    assert harness.pods() == []


@pytest.mark.full
def test_unusable_settings_are_errors(harness: PodProgramHarness, tmp_path: Path) -> None:
    """R17: a used port and a folder that cannot be created end the program with an exit code and a hint."""
    harness.write(ONE)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = penstock("serve", "query-api", "--port", str(taken.getsockname()[1]), cwd=tmp_path)
    assert result.code == 6
    assert "cannot listen on 127.0.0.1:" in result.err
    harness.write(ONE, memoryDir="/proc/no-such/place")
    result = penstock("serve", "query-api", "--port", "0", cwd=tmp_path)
    assert result.code == 3
    assert "/proc/no-such/place" in result.err
    assert "Traceback" not in result.err


@pytest.mark.full
def test_a_dictionary_that_does_not_fit_harms_no_other(
    harness: PodProgramHarness, client: httpx.Client, tmp_path: Path
) -> None:
    """R23: a dictionary that exceeds the memory limit is not served and reported; others are served and updated."""
    harness.write(LITTLE, memoryLimitMb=16)
    with Up(tmp_path) as up:
        submit(up, "LITTLE", 0)
        harness.write(LITTLE, BIG, memoryLimitMb=16)
        until(lambda: client.get(at(up.query, "BIG/items/1")).status_code == 503, "BIG is known")
        until(lambda: "MEMORY_FULL" in up.log_file.read_text(), "the error is logged")
        for value in range(1, 6):
            version = submit(up, "LITTLE", value)
            assert visible(client, up, "LITTLE", version) == value
        assert client.get(at(up.query, "BIG/items/1")).status_code == 503
        assert up.stop() == 0


def submit(up: Up, code: str, value: int) -> int:
    body = {"dictCode": code, "eventType": "DELTA", "items": [upsert("a", value)]}
    return int(answered(commit_update(f"{up.api}/v1/tenants/acme/updates", body))["committedVersion"])


def visible(client: httpx.Client, up: Up, code: str, version: int) -> Any:
    """Return the item `a` when *version* is in memory."""

    def is_there() -> bool:
        answer = client.get(at(up.query, f"{code}/items/a"))
        return answer.status_code == 200 and int(answer.headers["X-Dict-Version"]) >= version

    until(is_there, f"version {version} of {code}")
    return client.get(at(up.query, f"{code}/items/a")).json()


def answers(client: httpx.Client, url: str, status: int, body: Any = None) -> None:
    """Return when *url* has the expected response."""

    def is_so() -> bool:
        answer = client.get(url)
        return answer.status_code == status and body in (None, answer.json())

    until(is_so, f"{status} {body} from {url}")


@pytest.mark.full
def test_dictionaries_come_and_change_while_a_pod_runs(
    harness: PodProgramHarness, client: httpx.Client, tmp_path: Path
) -> None:
    """R1: in `up` and in a separate pod, added and changed dictionaries of the file are served without a restart."""
    harness.write(ONE)
    with Up(tmp_path) as up, QueryApi(tmp_path) as alone:
        queries = (up.query, alone.api)
        for query in queries:
            assert client.get(at(query, "ONE/items/a")).json() == 1
            assert client.get(at(query, "LITTLE/items/a")).status_code == 404
        harness.write(OTHER_ONE, LITTLE)
        for query in queries:
            answers(client, at(query, "ONE/items/a"), 200, 2)
        version = submit(up, "LITTLE", 5)
        for query in queries:
            answer = client.get(at(query, "LITTLE/items/a"), headers={"X-Min-Version": str(version)})
            assert (answer.status_code, answer.json()) == (200, 5)
        harness.write(OTHER_ONE)
        for query in queries:
            answers(client, at(query, "LITTLE/items/a"), 404)
