"""Choose the length of a campaign: short in `make test`, long in `make soak`."""

import os


def examples(short: int, *, soak: int) -> int:
    """Return the number of rounds to run."""
    return soak if os.environ.get("PENSTOCK_SOAK") else short
