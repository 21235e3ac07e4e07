"""The commit that the code was built from."""

import subprocess
from functools import cache
from importlib import resources
from pathlib import Path

from penstock import __version__

COMMIT_FILE = "_commit"  # written when a wheel is built


@cache
def find_code_commit() -> str:
    """Return the commit of this code: from the wheel, else from the checkout, else the version."""
    baked = resources.files("penstock") / COMMIT_FILE
    if baked.is_file():
        return baked.read_text().strip()
    return _read_checkout(Path(__file__).parent) or f"v{__version__}"


def _read_checkout(folder: Path) -> str | None:
    """Return the commit that is checked out, with the suffix -dirty if files were changed."""
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
