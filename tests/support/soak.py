"""Campaigns: tests that are short in `make test` and long in `make soak`."""

import os
from dataclasses import dataclass

SOAK = "PENSTOCK_SOAK"


@dataclass
class Campaign:
    """Count what a campaign does; the `campaign` fixture hands one to the test."""

    rounds: int = 0
    faults: int = 0
    counts_items: bool = False  # the campaign compares what went in with what came out, item by item

    def end_round(self, *, faults: int = 0) -> None:
        """Count a round whose checks have passed, and the faults in it."""
        self.rounds += 1
        self.faults += faults


def examples(short: int, *, soak: int) -> int:
    """Return how many rounds to run: *short* in `make test`, *soak* in `make soak`."""
    return soak if is_soak() else short


def is_soak() -> bool:
    """Return whether this run is `make soak`."""
    return bool(os.environ.get(SOAK))
