"""What import-linter cannot say of who knows what."""

import re
from pathlib import Path

import pytest

import penstock

ROOT = Path(penstock.__file__).parent


@pytest.mark.parametrize("file", sorted(ROOT.glob("*.py")), ids=lambda file: file.stem)
def test_programs_ask_parts_not_their_tables(file: Path) -> None:
    """T11: what a part keeps, and how, is its own: a program calls its functions, and says no SQL of it."""
    assert re.findall(r"\bSQL\b", re.sub(r'"BAD_SQL"', "", file.read_text())) == []
