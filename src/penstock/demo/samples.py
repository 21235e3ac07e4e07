"""The sample files of the demo and of the tutorial: price lists, supplier configurations, a flow, a configuration."""

import shutil
from pathlib import Path

from penstock.kernel.errors import BadConfig, Conflict

FOLDER = Path(__file__).parent
_KINDS = ("penstock.yaml", "files/*", "flows/*.yaml", "suppliers/*.yaml")


def list_samples() -> list[Path]:
    """Return the paths of all sample files, relative to FOLDER."""
    return sorted(file.relative_to(FOLDER) for kind in _KINDS for file in FOLDER.glob(kind))


def write_samples(folder: Path) -> list[Path]:
    """Write all sample files into *folder*, which is new or empty; return their paths."""
    written = []
    try:
        if folder.exists() and any(folder.iterdir()):
            hint = "choose a new folder: nothing was written"
            raise Conflict("DEMO_FOLDER_NOT_EMPTY", f"{folder} is not empty", hint=hint)
        for sample in list_samples():
            target = folder / sample
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(FOLDER / sample, target)
            written.append(target)
    except OSError as error:
        hint = "choose a folder that this user can create and write to"
        message = f"cannot write sample files to {folder}: {error.strerror or error}"
        raise BadConfig("DEMO_FOLDER_UNUSABLE", message, hint=hint) from error
    return written
