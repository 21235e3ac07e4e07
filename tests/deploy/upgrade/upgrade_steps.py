"""What steps of a flow do that two processes share: it is written down, and each waits until both are at work."""

import os
from pathlib import Path

from tests.support.wait import until


def do_it(item: int, file: str) -> int:
    """Leave a line; the first ones wait for the other process, so that neither does all of it."""
    with Path(file).open("a") as done:
        done.write(f"{item} {os.getpid()}\n")
    until(lambda: len({line.split()[1] for line in Path(file).read_text().splitlines()}) > 1, "the other one comes")
    return item
