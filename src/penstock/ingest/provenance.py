"""Which code made a run: its commit and its versions."""

import platform
import subprocess
from functools import cache
from importlib import resources
from importlib.metadata import version
from pathlib import Path

from penstock import __version__

COMMIT_FILE = "_commit"  # written when a wheel is built
_LIBRARIES = ("polars", "python-calamine")


@cache
def code_commit() -> str:
    """The commit of this code: as the wheel was told when it was built, else as the checkout says; else the version."""
    baked = resources.files("penstock") / COMMIT_FILE
    if baked.is_file():
        return baked.read_text().strip()
    return _checked_out(Path(__file__).parent) or f"v{__version__}"


@cache
def versions() -> dict[str, str]:
    """What the result may depend on."""
    return {
        "penstock": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
    }


def _checked_out(folder: Path) -> str | None:
    """The commit that is checked out, marked when files are not as committed."""
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None
