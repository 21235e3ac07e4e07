"""Shell completion: scripts, commands, options, and the names of a running server."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import Up, penstock_here
from tests.support.settings import write_config
from tests.support.wait import until

BIN = Path(sys.executable).parent
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "flows").mkdir()
    (folder / "flows" / "nightly.yaml").write_text("name: nightly\nsteps: {}\n")
    write_config(folder, {"flows": {"folder": "flows"}, "refdata": {"dictionaries": [{"code": "RATES"}]}})
    with Up(folder) as up:
        yield up


def complete(words: str, url: str = NOWHERE) -> list[str]:
    """Return the completions of the last word, as bash requests them."""
    typed = words.split(" ")
    variables = {"COMP_WORDS": " ".join(typed), "COMP_CWORD": str(len(typed) - 1), "PENSTOCK_URL": url}
    env = {**os.environ, **variables, "_PENSTOCK_COMPLETE": "complete_bash"}
    done = subprocess.run([BIN / "penstock"], env=env, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("penstock dict ret", ["retained", "retain"]),
        ("penstock track retry my", ["mysql-sender"]),
        ("penstock flow runs --status F", ["FAILED"]),
        ("penstock flow run --ti", ["--timeout"]),
        ("penstock completion z", ["zsh"]),
    ],
)
def test_commands_options_and_choices_are_completed(words: str, expected: list[str]) -> None:
    """CLI: groups, commands, options and choices; no server is needed."""
    assert complete(words) == expected


def test_names_of_a_server_are_completed(server: Up) -> None:
    """CLI: flows and dictionaries come from the server; without one there are no names and no error."""
    until(lambda: complete("penstock flow show ni", server.api) == ["nightly"], "the server answers within a second")
    until(lambda: complete("penstock dict show acme ", server.api) == ["RATES"], "the server answers within a second")
    assert complete("penstock flow show ni") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_valid_in_its_shell(shell: str, tmp_path: Path) -> None:
    """CLI: the shell can parse the script, which has both programs."""
    done = penstock_here("completion", shell, cwd=tmp_path)
    assert (done.code, "pipeline-apid" in done.out) == (0, True)
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=done.out, text=True, check=True)
