"""`penstock config` as a user types it."""

import json
from pathlib import Path

from tests.support.processes import penstock, penstock_from_scratch


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
    """R27: PENSTOCK_CONFIG names the file, so that commands in a container find it; the command line overrides it."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(f"data_dir: /{name}\n")
    env = {"PENSTOCK_CONFIG": str(tmp_path / "one.yaml")}
    assert "/one" in penstock("config", "show", cwd=tmp_path, env=env).out
    assert "/two" in penstock("config", "show", "--config", str(tmp_path / "two.yaml"), cwd=tmp_path, env=env).out
    assert penstock("config", "show", cwd=tmp_path, env={"PENSTOCK_CONFIG": "none.yaml"}).code == 3
