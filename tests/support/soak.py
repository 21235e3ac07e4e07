"""How many examples and rounds a test tries: few in `make quick` and `make test`, the most in `make soak`."""

import os
from dataclasses import dataclass

import pytest
from hypothesis import settings

SOAK = "PENSTOCK_SOAK"
DIVISOR = "PENSTOCK_EXAMPLES_DIVISOR"  # set by `make quick` and `make test`, which try a part of the examples
SETTINGS = "_hypothesis_internal_use_settings"  # of the function of a Hypothesis test
_divided: set[object] = set()


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
    """Return how many rounds to run: *short* in `make test` and `make test-all`, *soak* in `make soak`."""
    return soak if is_soak() else short


def model_examples(short: int, *, soak: int) -> int:
    """Return how many examples a model tries: *short* in `make test-all`, a part of them in `make test`."""
    return examples(_divide(short), soak=soak)


def divide_examples(item: pytest.Item) -> None:
    """Let a Hypothesis test try a part of its examples, once: the cases of a parametrised test share one function."""
    test = getattr(item, "obj", None)
    if (full := getattr(test, SETTINGS, None)) is not None and test not in _divided and not is_soak():
        setattr(test, SETTINGS, settings(full, max_examples=_divide(full.max_examples)))
        _divided.add(test)


def _divide(number: int) -> int:
    return -(-number // int(os.environ.get(DIVISOR, "1")))


def is_soak() -> bool:
    """Return whether this run is `make soak`."""
    return bool(os.environ.get(SOAK))
