"""Whom a server of ours runs as: PostgreSQL refuses root, so root lends it an account without rights."""

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from penstock.kernel.errors import BadConfig, Conflict

Process = subprocess.Popen[bytes]
_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_READ, _DAC_READ_SEARCH = 23, 2


@dataclass(frozen=True)
class OsAccount:
    """Starts processes as *entry*, or as the present user when there is none."""

    entry: pwd.struct_passwd | None
    can_enter: bool  # whether the account may walk down to the folders it needs

    @classmethod
    def for_folders(cls, data: Path, programs: Path) -> "OsAccount":
        """The account to run *programs* on *data*; root's data folder becomes that account's."""
        if os.geteuid() != 0:
            return cls(None, can_enter=True)
        entry = _entry(data)
        os.chown(data, entry.pw_uid, entry.pw_gid)
        can_enter = _may_enter(entry, data) and _may_enter(entry, programs)
        if not can_enter and shutil.which("setpriv") is None:
            raise BadConfig(
                "POSTGRES_FOLDER_NO_ACCESS",
                f"as root, PostgreSQL runs as {entry.pw_name}, who may not enter {data} or {programs}",
                hint="run Penstock as an ordinary user, install util-linux (setpriv), or use folders others may enter",
            )
        return cls(entry, can_enter)

    def spawn(self, command: Sequence[str], *, stdout: IO[bytes] | int) -> Process:
        """Start *command* in a session of its own; it is told to stop should this process die."""
        become, identity = self._become()
        return subprocess.Popen(
            [*become, *command],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            cwd="/",
            start_new_session=True,  # Ctrl-C is for Penstock, which stops its servers last
            preexec_fn=_stop_with_parent(),
            **identity,
        )

    def _become(self) -> tuple[list[str], dict[str, Any]]:
        """The words before a command, and the arguments to Popen, that run it as the account."""
        if self.entry is None:
            return [], {}
        user, group = self.entry.pw_uid, self.entry.pw_gid
        if self.can_enter:
            return [], {"user": user, "group": group, "extra_groups": []}
        # Folders such as /root are closed to the account: give it the one right to walk through them.
        who = [f"--reuid={user}", f"--regid={group}", "--clear-groups", "--pdeathsig=INT"]
        # This process may be unable to hand that on: containers are often denied some capabilities.
        may_give = ctypes.CDLL(None).prctl(_PR_CAPBSET_READ, _DAC_READ_SEARCH) == 1
        right = "dac_read_search" if may_give else "dac_override"
        return ["setpriv", *who, f"--inh-caps=+{right}", f"--ambient-caps=+{right}"], {}

    def make_private(self, folder: Path) -> None:
        """Create *folder* for the account alone; Conflict when somebody else was there first."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        mine = {os.geteuid()} | ({self.entry.pw_uid} if self.entry else set())
        if found.st_uid not in mine or folder.is_symlink():
            raise Conflict(
                "FOLDER_OWNED_BY_OTHER",
                f"{folder} belongs to another user",
                hint="remove it, or use another data directory",
            )
        folder.chmod(0o700)
        if self.entry is not None:
            os.chown(folder, self.entry.pw_uid, self.entry.pw_gid)


def _entry(folder: Path) -> pwd.struct_passwd:
    """The account that owns the folder already, else the least of those that exist."""
    if folder.is_symlink():
        hint = "name the folder it leads to"
        raise BadConfig(
            "FOLDER_IS_LINK", f"{folder} is a link; as root Penstock changes no owner behind one", hint=hint
        )
    if (owner := folder.stat().st_uid) != 0:
        with contextlib.suppress(KeyError):
            return pwd.getpwuid(owner)
        hint = "change its owner to an account of this machine"
        raise BadConfig("NO_ACCOUNT", f"{folder} belongs to user {owner}, who has no account here", hint=hint)
    for name in ("penstock", "postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise BadConfig(
        "NO_ACCOUNT",
        "PostgreSQL does not run as root, and there is no account to run it as",
        hint="useradd penstock",
    )


def _may_enter(entry: pwd.struct_passwd, path: Path) -> bool:
    """Whether the account can walk down to *path*; rights of a group are not counted, so a no may be too strict."""
    for folder in (path, *path.parents):
        found = folder.stat()
        if not (found.st_mode & 0o001 or (found.st_uid == entry.pw_uid and found.st_mode & 0o100)):
            return False
    return True


def _stop_with_parent() -> Callable[[], object] | None:
    """What to run between fork and exec so that the child is interrupted when this process dies."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork: nothing may be loaded after it
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
