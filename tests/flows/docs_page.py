"""The document of flows, for the tests that hold it to what it says."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "flows.md").read_text()


def blocks(language: str) -> list[str]:
    """The examples of docs/flows.md in one language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
