"""`penstock version`."""

import platform

from penstock import __version__
from penstock.cli.output import JsonOption, emit


def version(json: JsonOption = False) -> None:
    """Say which release this is."""
    data = {"penstock": __version__, "python": platform.python_version(), "platform": platform.platform()}
    emit(data, as_json=json, text=f"penstock {__version__}")
