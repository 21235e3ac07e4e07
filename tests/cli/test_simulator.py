"""H17: `penstock harvest source` as a user types it."""

import json
import signal
import socket
import subprocess
import sys
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

from penstock.cli.harvest import app
from penstock.kernel.errors import Conflict, Invalid

COMMAND = [sys.executable, "-m", "penstock.cli.main", "harvest", "source"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal(number: signal.Signals) -> None:
    """H17: one line tells where it listens and what it serves; a signal ends it well."""
    options = ["--records", "50", "--port", "0", "--rate-short", "1", "--churn", "5", "--order", "id", "--json"]
    with subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            document = json.loads(process.stdout.readline())
            with urlopen(f"{document['api']}/records") as answer:
                page = json.load(answer)
        finally:
            process.send_signal(number)
        assert process.wait(20) == 0
    assert (document["event"], document["records"], document["order"]) == ("ready", 50, "id")
    assert (page["total"], page["hasMore"]) == (50, True)
    assert 1 <= len(page["items"]) < 30


def test_a_port_in_use_is_an_error() -> None:
    """H17: under the code every program of ours tells it with."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = CliRunner().invoke(app, ["source", "--port", port, "--records", "1"])
    assert isinstance(refused.exception, Conflict)
    assert refused.exception.code == "PORT_IN_USE"


def test_it_does_not_listen_for_others() -> None:
    """H17: loopback only; rates that are none are refused before anything is made."""
    refused = CliRunner().invoke(app, ["source", "--host", "0.0.0.0", "--records", "1"])
    assert isinstance(refused.exception, Invalid)
    assert CliRunner().invoke(app, ["source", "--rate-500", "1.5"]).exit_code == 2
