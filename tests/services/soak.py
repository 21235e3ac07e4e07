"""Short in `make test`, long in `make soak`: one switch for every campaign."""

import os


def examples(short: int, *, soak: int) -> int:
    """How many rounds to run."""
    return soak if os.environ.get("PENSTOCK_SOAK") else short
