"""A real MariaDB on a socket of its own, for what writes into MySQL shards."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.wait import until


def mariadb_binary() -> str | None:
    """Where the server is, or None."""
    return shutil.which("mariadbd")


@contextmanager
def running_mariadb() -> Iterator[Path]:
    """The socket of a server with empty data; gone afterwards."""
    binary = mariadb_binary()
    assert binary is not None
    folder = Path(tempfile.mkdtemp(prefix="penstock-mariadb-"))
    user = ["--user=root"] if os.geteuid() == 0 else []
    common = ["--no-defaults", f"--datadir={folder / 'data'}", *user]
    subprocess.run(
        ["mariadb-install-db", *common, "--auth-root-authentication-method=normal"], check=True, capture_output=True
    )
    socket = folder / "socket"
    process = subprocess.Popen(
        [binary, *common, f"--socket={socket}", "--skip-networking"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: _answers(socket, process), "MariaDB does not answer", within=60)
        yield socket
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def query(socket: Path, statement: str) -> str:
    """What the server answers, as its own client prints it."""
    command = ["mariadb", "--no-defaults", f"--socket={socket}", "--user=root", "--batch", "--skip-column-names"]
    return subprocess.run([*command, "-e", statement], check=True, capture_output=True, text=True).stdout.strip()


def _answers(socket: Path, process: "subprocess.Popen[bytes]") -> bool:
    if process.poll() is not None:
        raise RuntimeError("MariaDB did not start")
    try:
        query(socket, "SELECT 1")
    except subprocess.CalledProcessError:
        return False
    return True
