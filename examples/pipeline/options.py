"""The options of every daemon of the pipeline."""

import argparse
import os
from pathlib import Path

URL = "http://127.0.0.1:8085"


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options all daemons share; each adds its own."""
    made = argparse.ArgumentParser(description=description)
    url = os.environ.get("PENSTOCK_URL", URL)
    made.add_argument("--url", default=url, help="where the pipeline API listens (%(default)s)")
    made.add_argument("--folder", type=Path, required=True, help="where the stages leave files for one another")
    made.add_argument("--worker", help="the name the history shows; each daemon needs one of its own")
    return made


def queue_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of a daemon that takes its work from a queue."""
    made = parser(description)
    made.add_argument("--lease", type=float, default=60, help="seconds until a dead worker's items go to another")
    made.add_argument("--batch", type=int, default=10, help="items taken at a time")
    return made


def token() -> str | None:
    """The API's bearer token, if it wants one; from the environment, because arguments can be seen by all."""
    return os.environ.get("PENSTOCK_TOKEN")
