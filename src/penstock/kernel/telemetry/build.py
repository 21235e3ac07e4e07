"""Which code this is."""

import subprocess
from functools import cache
from importlib import resources
from pathlib import Path

from penstock import __version__

COMMIT_FILE = "_commit"  # written when a wheel is built


@cache
def code_commit() -> str:
    """The commit of this code: as the wheel was told when it was built, else as the checkout says; else the version."""
    baked = resources.files("penstock") / COMMIT_FILE
    if baked.is_file():
        return baked.read_text().strip()
    return _checked_out(Path(__file__).parent) or f"v{__version__}"


def _checked_out(folder: Path) -> str | None:
    """The commit that is checked out, marked when files are not as committed."""
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None
