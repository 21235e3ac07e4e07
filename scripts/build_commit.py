"""Tell a wheel, while it is built, which commit it is built from; a manifest names it long after."""

import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FILE = "src/penstock/_commit"


class CommitHook(BuildHookInterface[Any]):
    """Puts the commit into the wheel; a source tree without git keeps the file it came with, if it has one."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return  # the checkout says it itself
        command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        try:
            found = subprocess.run(command, capture_output=True, text=True, cwd=self.root, check=False)
        except OSError:
            return
        if found.returncode == 0:
            self._file = Path(self.root) / FILE
            self._file.write_text(found.stdout)
            build_data["force_include"][str(self._file)] = "penstock/_commit"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        if written := getattr(self, "_file", None):
            written.unlink(missing_ok=True)
