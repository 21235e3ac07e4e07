"""The page docs/flows.md, for the tests that compare it with the code."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "flows.md").read_text()


def blocks(language: str) -> list[str]:
    """Return the examples of docs/flows.md in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
