"""One run of a group of benchmarks: its form, its folder, and the contenders it leaves out."""

import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

_PACKAGES = {"nginx": "nginx", "wrk": "wrk", "redis-server": "redis-server", "redis-benchmark": "redis-tools"}


@dataclass(frozen=True)
class Form:
    """The extent of a run: the whole measurement, or as little as shows that the benchmarks still work."""

    name: str
    rounds: int  # unless the command line gives another number
    warms_up: bool
    is_complete: bool  # whether it ends where a contender is missing, instead of leaving it out


FULL = Form("full", rounds=5, warms_up=True, is_complete=True)
SMOKE = Form("smoke", rounds=1, warms_up=False, is_complete=False)


@dataclass(frozen=True)
class Session:
    """The form and the temporary folder of a run, and what it does not measure."""

    form: Form
    folder: Path
    left_out: list[str] = field(default_factory=list)

    @property
    def postgres(self) -> Path:
        """Return the folder of the PostgreSQL that a group starts."""
        return self.folder / "postgres"

    def leave_out(self, name: str, reason: str) -> None:
        """Note a contender that is not measured."""
        self.left_out.append(f"{name}: {reason}")
        print(f"left out: {name}: {reason}", file=sys.stderr)

    def has_peers(self, *names: str) -> bool:
        """Return whether the run includes peers that need environments of their own; if not, note their names."""
        if not self.form.is_complete:
            for name in names:
                self.leave_out(name, "needs an environment of its own, which a smoke run does not make")
        return self.form.is_complete

    def require_tool(self, name: str) -> str:
        """Return the path of a program without which nothing can be measured; SystemExit where there is none."""
        if (found := self._which(name)) is None:
            raise SystemExit(f"{name} is missing, and this group measures with it: apt-get install {_PACKAGES[name]}")
        return found

    def find_tool(self, name: str) -> str | None:
        """Return the path of a program that only some benchmarks need; without it a smoke run leaves them out."""
        if self.form.is_complete:
            return self.require_tool(name)
        if (found := self._which(name)) is None:
            self.leave_out(name, "not found on this machine")
        return found

    def _which(self, name: str) -> str | None:
        """Look in PATH; the copy of a wheel is another version, which is good enough where nothing is compared."""
        folders = os.environ.get("PATH", "").split(os.pathsep)
        system = [folder for folder in folders if not folder.startswith(sys.prefix)]
        wheels = [] if self.form.is_complete else [str(Path(sys.prefix) / "bin")]
        return shutil.which(name, path=os.pathsep.join([*system, "/usr/sbin", *wheels]))
