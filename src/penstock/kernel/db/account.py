"""The operating system account of the embedded PostgreSQL, which refuses to run as root."""

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
    """The account that processes are started as: *entry*, or the current user if there is none."""

    entry: pwd.struct_passwd | None
    can_enter: bool  # whether the account can traverse the path to the folders that it needs

    @classmethod
    def choose_for_folders(cls, data: Path, programs: Path) -> "OsAccount":
        """Return the account to run *programs* on *data*; a data folder of root is given to that account."""
        if os.geteuid() != 0:
            return cls(None, can_enter=True)
        entry = _choose_account(data)
        os.chown(data, entry.pw_uid, entry.pw_gid)
        can_enter = _may_enter(entry, data) and _may_enter(entry, programs)
        if not can_enter and shutil.which("setpriv") is None:
            raise BadConfig(
                "POSTGRES_FOLDER_NO_ACCESS",
                f"PostgreSQL cannot run as root, and the account {entry.pw_name} has no access to {data} or {programs}",
                hint="run Penstock as an ordinary user, install util-linux (setpriv), or grant access to the folders",
            )
        return cls(entry, can_enter)

    def spawn(self, command: Sequence[str], *, stdout: IO[bytes] | int) -> Process:
        """Start *command* in a new session; it is interrupted when this process dies."""
        prefix, identity = self._make_identity()
        return subprocess.Popen(
            [*prefix, *command],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            cwd="/",
            start_new_session=True,  # Ctrl-C goes to Penstock only, which stops its servers last
            preexec_fn=_stop_with_parent(),
            **identity,
        )

    def _make_identity(self) -> tuple[list[str], dict[str, Any]]:
        """Return the prefix of a command, and the arguments of Popen, that run it as the account."""
        if self.entry is None:
            return [], {}
        user, group = self.entry.pw_uid, self.entry.pw_gid
        if self.can_enter:
            return [], {"user": user, "group": group, "extra_groups": []}
        # The account cannot traverse folders such as /root: grant it only the capability for that.
        account = [f"--reuid={user}", f"--regid={group}", "--clear-groups", "--pdeathsig=INT"]
        # Containers often lack some capabilities, which then cannot be passed on.
        can_pass = ctypes.CDLL(None).prctl(_PR_CAPBSET_READ, _DAC_READ_SEARCH) == 1
        capability = "dac_read_search" if can_pass else "dac_override"
        return ["setpriv", *account, f"--inh-caps=+{capability}", f"--ambient-caps=+{capability}"], {}

    def make_private(self, folder: Path) -> None:
        """Create *folder* for the account alone; Conflict if it belongs to another user."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        allowed = {os.geteuid()} | ({self.entry.pw_uid} if self.entry else set())
        if folder.lstat().st_uid not in allowed or folder.is_symlink():
            raise Conflict(
                "FOLDER_OWNED_BY_OTHER",
                f"{folder} belongs to another user",
                hint="remove it, or use another data directory",
            )
        folder.chmod(0o700)
        if self.entry is not None:
            os.chown(folder, self.entry.pw_uid, self.entry.pw_gid)


def _choose_account(folder: Path) -> pwd.struct_passwd:
    """Return the account that owns the folder, or else the least privileged account that exists."""
    if folder.is_symlink():
        hint = "set data_dir to the folder that the link points to"
        raise BadConfig(
            "FOLDER_IS_LINK", f"{folder} is a symbolic link, whose target root must not hand to an account", hint=hint
        )
    if (owner := folder.stat().st_uid) != 0:
        with contextlib.suppress(KeyError):
            return pwd.getpwuid(owner)
        hint = "change its owner to an account of this machine"
        raise BadConfig("NO_ACCOUNT", f"{folder} belongs to user {owner}, which has no account here", hint=hint)
    for name in ("penstock", "postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise BadConfig(
        "NO_ACCOUNT",
        "PostgreSQL cannot run as root, and this machine has no account without rights to run it as",
        hint="useradd penstock",
    )


def _may_enter(entry: pwd.struct_passwd, path: Path) -> bool:
    """Return whether the account can traverse the path to *path*. Rights of groups are ignored."""
    for folder in (path, *path.parents):
        stat = folder.stat()
        if not (stat.st_mode & 0o001 or (stat.st_uid == entry.pw_uid and stat.st_mode & 0o100)):
            return False
    return True


def _stop_with_parent() -> Callable[[], object] | None:
    """Return a function to run between fork and exec, so that the child is interrupted when this process dies."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork: nothing may be loaded after it
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
