"""Which versions made a run."""

import platform
from functools import cache
from importlib.metadata import version

from penstock import __version__

_LIBRARIES = ("polars", "python-calamine")


@cache
def versions() -> dict[str, str]:
    """What the result may depend on."""
    return {
        "penstock": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
    }
