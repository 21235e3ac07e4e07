"""docs/tutorial.md works: all commands are executed in their order, and their output is compared with the page."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.pages import ROOT
from tests.support.console import Typed, blocks_of, typed_in
from tests.support.page_output import Names
from tests.support.ports import free_port
from tests.support.processes import penstock_here
from tests.support.wait import until

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
API, QUERY, SOURCE = "127.0.0.1:8080", "127.0.0.1:8081", "127.0.0.1:8090"
_FOR_A_SHELL = re.compile(r"[|<>*]")
_NAMED = re.compile(r"# ([\w/]+\.(?:yaml|py))\n")


class Newcomer:
    """A user with several terminals, in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = Names()
        self._logs = folder
        self._ports = {address: str(free_port()) for address in (API, QUERY, SOURCE)}
        self._staying: dict[str, subprocess.Popen[bytes]] = {}
        self._env = self._environment()

    def _environment(self) -> dict[str, str]:
        """That of the machine; the ports are those of this time."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK")}
        return {**kept, "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}"}

    @property
    def url(self) -> str:
        return self.here(f"http://{API}")

    @property
    def query_url(self) -> str:
        return self.here(f"http://{QUERY}")

    def here(self, text: str) -> str:
        """What the page says, with the addresses of this time."""
        for address, port in self._ports.items():
            text = text.replace(address, f"127.0.0.1:{port}")
        return text

    def save(self, name: str, text: str) -> None:
        """A file of the page; a server that runs has taken it over before anything else is typed."""
        before = self._reloads()
        (self.folder / name).write_text(self.here(text))
        if name == "penstock.yaml" and "up" in self._staying:
            until(lambda: self._reloads() > before, "the configuration is taken over")
        if name.startswith("flows/"):
            until(lambda: Path(name).stem in httpx.get(f"{self.url}/api/v1/flows").text, "the flow is known")

    def _reloads(self) -> int:
        log = self._logs / "up.err"
        return log.read_text().count("configuration_reloaded") if log.exists() else 0

    def type(self, typed: Typed) -> None:
        """One command: it ends as the page says, and shows what the page shows."""
        words = shlex.split(typed.line, comments=True)
        if words[0] == "cd":
            self.folder = self.folder / words[1]
        elif words[:2] == ["penstock", "up"]:
            self._stay("up", [*words, "--port", self._ports[API], "--query-port", self._ports[QUERY]], typed.shown)
        elif words[:3] == ["penstock", "harvest", "source"]:
            self._stay("source", [*words, "--port", self._ports[SOURCE]], typed.shown)
        elif words[0] == "python":
            self._stay("daemon", words, typed.shown)
        else:
            self._run(typed)
        if words[:2] == ["penstock", "demo"]:
            for file in self.folder.rglob("*.yaml"):
                file.write_text(self.here(file.read_text()))

    def _run(self, typed: Typed) -> None:
        line = self.names.here(self.here(typed.line))
        if line.startswith("penstock ") and not _FOR_A_SHELL.search(line):
            done = penstock_here(*shlex.split(line, comments=True)[1:], cwd=self.folder)
            code, out, err = done.code, done.out, done.err
        else:
            shell = subprocess.run(
                ["bash", "-c", line], cwd=self.folder, env=self._env, capture_output=True, text=True, check=False
            )
            code, out, err = shell.returncode, shell.stdout, shell.stderr
        assert code == typed.code, (line, out, err)
        shown = self.here(typed.shown)
        assert self.names.are_in(shown, err + out) or self.names.are_in(shown, out + err), f"{line}\n{err}{out}"

    def _stay(self, name: str, words: list[str], shown: str) -> None:
        """Start what goes on by itself, in a terminal of its own; what ran there is ended with Ctrl-C."""
        self._end(name)
        out, err = self._logs / f"{name}.out", self._logs / f"{name}.err"
        with out.open("wb") as stdout, err.open("ab") as log:
            self._staying[name] = subprocess.Popen(words, cwd=self.folder, env=self._env, stdout=stdout, stderr=log)
        until(lambda: self.names.are_in(self.here(shown), out.read_text()), f"{words} shows what the page shows")

    def _end(self, name: str) -> None:
        if process := self._staying.pop(name, None):
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0

    def leave(self) -> None:
        for process in self._staying.values():
            process.kill()
            process.wait(30)


@pytest.mark.full
def test_everything_on_the_page_works_as_it_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F14, R2, I23: all five parts by hand, from the first rate to a failed flow that is fixed and retried."""
    newcomer = Newcomer(tmp_path)
    monkeypatch.setenv("PENSTOCK_URL", newcomer.url)
    monkeypatch.setenv("PENSTOCK_QUERY_URL", newcomer.query_url)
    try:
        for block in blocks_of(PAGE):
            if named := _NAMED.match(block.text):
                newcomer.save(named[1], block.text)
            else:
                assert block.language == "console"
                for typed in typed_in(block.text):
                    newcomer.type(typed)
    finally:
        newcomer.leave()
