"""The options of every daemon of the pipeline."""

import argparse
import os
from pathlib import Path

URL = "http://127.0.0.1:8085"


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the options that all daemons share."""
    options = argparse.ArgumentParser(description=description)
    url = os.environ.get("PENSTOCK_URL", URL)
    options.add_argument("--url", default=url, help="address of the pipeline API (%(default)s)")
    options.add_argument("--folder", type=Path, required=True, help="folder in which the stages exchange files")
    options.add_argument("--worker", help="name of this daemon in the history; unique for each daemon")
    return options


def queue_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the options of a daemon that claims its work from a queue."""
    options = parser(description)
    options.add_argument(
        "--lease", type=float, default=60, help="seconds until another worker can claim the items of a dead one"
    )
    options.add_argument("--batch", type=int, default=10, help="items claimed at once")
    return options


def token() -> str | None:
    """Return the bearer token of the API, if any; from the environment, because arguments are visible to all users."""
    return os.environ.get("PENSTOCK_TOKEN")
