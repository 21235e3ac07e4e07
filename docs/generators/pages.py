"""All pages and pictures that are generated from the code."""

from docs.generators.api import api
from docs.generators.cli import cli
from docs.generators.codes import reason_codes
from docs.generators.configuration import configuration
from docs.generators.events import events
from docs.generators.machines import pictures
from docs.generators.metrics import metrics

PAGES = {
    "cli": cli,
    "configuration": configuration,
    "api": api,
    "events": events,
    "reason-codes": reason_codes,
    "metrics": metrics,
}


def generated() -> dict[str, str]:
    """Return every page and picture by its path below docs/."""
    return {**{f"reference/{name}.md": write() for name, write in PAGES.items()}, **pictures()}
