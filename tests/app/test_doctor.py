"""What `doctor` asks, and what it tells of what is down."""

import json
from pathlib import Path

from tests.support.processes import penstock


def test_doctor_asks_every_server_that_is_configured(tmp_path: Path) -> None:
    """R8, R23: Kafka and Redis that do not answer are named, also before the first start."""
    (tmp_path / "penstock.yaml").write_text(
        "server: {port: 0, query_port: 0}\n"
        'bus: {kafka: {bootstrap: "127.0.0.1:1"}}\n'
        'signals: {redis: {nodes: ["127.0.0.1:1"]}}\n'
    )
    done = penstock("doctor", "--json", cwd=tmp_path)
    codes = {finding["name"]: (finding["error"] or {}).get("code") for finding in json.loads(done.out)}
    assert done.code == 7
    assert (codes["bus"], codes["signals"], codes["database"]) == ("BUS_DOWN", "SIGNALS_DOWN", None)


def test_doctor_changes_nothing_and_names_what_is_down(tmp_path: Path) -> None:
    """`doctor` leaves no trace on a fresh machine, and gives exit code 7 with a hint when a dependency is down."""
    assert (
        penstock("doctor", cwd=tmp_path, env={"PENSTOCK__SERVER__PORT": "0", "PENSTOCK__SERVER__QUERY_PORT": "0"}).code
        == 0
    )
    assert list(tmp_path.iterdir()) == []
    down = {"PENSTOCK__DATABASE__URL": "postgresql://nobody@127.0.0.1:1/none"}
    done = penstock("doctor", "--json", cwd=tmp_path, env=down)
    database = next(finding for finding in json.loads(done.out) if finding["name"] == "database")
    assert done.code == 7
    assert database["error"]["code"] == "DATABASE_DOWN"
    assert database["error"]["hint"]
