"""Commands that messages suggest."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

import penstock
from penstock.cli.main import app
from penstock.cli.server_address import select_config_file
from penstock.cli.suggestion import make_pasteable

TEXT = "run `penstock flow show r-1`, or `penstock doctor`"


@pytest.fixture(autouse=True)
def no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_URL", raising=False)
    select_config_file(None)


def test_a_suggested_command_repeats_the_url() -> None:
    """CLI: a suggested command works in any folder, so it names the server unless that is the default."""
    wanted = "run `penstock flow show r-1 --url http://there:9000`, or `penstock doctor`"
    assert make_pasteable(TEXT, url="there:9000") == wanted
    assert make_pasteable(wanted, url="there:9000") == wanted
    assert make_pasteable(TEXT, url=None) == TEXT
    assert make_pasteable(TEXT, url="http://127.0.0.1:8080") == TEXT


def test_the_environment_of_the_shell_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """CLI: PENSTOCK_URL is still there when the command is pasted; `--url` beside it is not."""
    monkeypatch.setenv("PENSTOCK_URL", "there:9000")
    assert make_pasteable(TEXT, url=None) == TEXT
    assert "--url http://127.0.0.1:8080" in make_pasteable(TEXT, url="127.0.0.1:8080")


def test_a_server_of_a_file_in_this_folder_is_named(tmp_path: Path) -> None:
    """CLI: ./penstock.yaml is not found from another folder, so the address is repeated."""
    (tmp_path / "penstock.yaml").write_text("server: {port: 9000}\n")
    assert "show r-1 --url http://127.0.0.1:9000`" in make_pasteable(TEXT, url=None)


def test_any_other_option_is_repeated_where_it_is_accepted() -> None:
    """CLI: `--root` is appended to the commands that have it, and quoted."""
    text = "`penstock ingest bad-rows r` shows them, `penstock flow show r` does not"
    assert make_pasteable(text, root="/a b") == (
        "`penstock ingest bad-rows r --root '/a b'` shows them, `penstock flow show r` does not"
    )


def test_every_command_in_a_message_exists() -> None:
    """CLI: hints, errors and status suggest only commands that the command line has."""
    root, checked = typer.main.get_command(app), 0
    for file in Path(penstock.__file__).parent.rglob("*.py"):
        for command in re.findall(r"(?:[`\"]|; |then )penstock ([a-z][a-z -]*[a-z])", file.read_text()):
            assert _is_command(root, command.split()), f"{file}: penstock {command}"
            checked += 1
    assert checked > 50


def _is_command(group: Any, words: list[str]) -> bool:
    commands = getattr(group, "commands", None)
    return commands is None or not words or (words[0] in commands and _is_command(commands[words[0]], words[1:]))
