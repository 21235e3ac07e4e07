"""`penstock` itself: what it imports, its version, its configuration, and `doctor`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import penstock, penstock_from_scratch

HEAVY = {"asyncpg", "fastapi", "rich", "uvicorn", "structlog", "opentelemetry", "confluent_kafka", "redis", "obstore"}


def test_help_is_quick_because_it_loads_little() -> None:
    """`penstock --help` imports none of the heavy libraries, whatever commands will."""
    code = (
        "import sys; sys.argv = ['penstock', '--help']\n"
        "from penstock.cli.main import run\n"
        "try: run()\n"
        "except SystemExit: pass\n"
        f"print('LOADED', sorted({HEAVY} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "LOADED []" in done.stdout


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_is_an_option_too(option: str, tmp_path: Path) -> None:
    """`penstock --version` and `-V` print the same as `penstock version`, and end with 0."""
    assert penstock(option, cwd=tmp_path) == penstock("version", cwd=tmp_path)
    assert penstock(option, cwd=tmp_path).code == 0


def test_version_config_and_schema_speak_json(tmp_path: Path) -> None:
    """`--json` works everywhere: data on standard output, nothing else there."""
    assert json.loads(penstock_from_scratch("version", "--json", cwd=tmp_path).out)["penstock"]
    assert json.loads(penstock("config", "show", "--json", cwd=tmp_path).out)["server"]["port"] == 8080
    assert json.loads(penstock("config", "schema", cwd=tmp_path).out)["title"] == "Settings"
    assert json.loads(penstock("config", "validate", "--json", cwd=tmp_path).out) == {"valid": True}
    failed = penstock("config", "validate", "--json", "--config", "nowhere.yaml", cwd=tmp_path)
    assert json.loads(failed.err)["error"]["code"] == "CONFIG_UNREADABLE"
    assert (failed.code, failed.out) == (3, "")


def test_the_environment_can_name_the_configuration(tmp_path: Path) -> None:
    """R27: so that whoever looks into a container need not know where it is; the command line goes first."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(f"data_dir: /{name}\n")
    env = {"PENSTOCK_CONFIG": str(tmp_path / "one.yaml")}
    assert "/one" in penstock("config", "show", cwd=tmp_path, env=env).out
    assert "/two" in penstock("config", "show", "--config", str(tmp_path / "two.yaml"), cwd=tmp_path, env=env).out
    assert penstock("config", "show", cwd=tmp_path, env={"PENSTOCK_CONFIG": "none.yaml"}).code == 3


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
