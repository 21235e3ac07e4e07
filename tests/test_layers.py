"""What import-linter cannot say of who knows what."""

import re
from pathlib import Path

import pytest

import penstock

ROOT = Path(penstock.__file__).parent
KERNEL_PAGE = ROOT.parent.parent / "docs" / "kernel.md"


@pytest.mark.parametrize("file", sorted(ROOT.glob("*.py")), ids=lambda file: file.stem)
def test_programs_ask_parts_not_their_tables(file: Path) -> None:
    """T11: what a part keeps, and how, is its own: a program calls its functions, and says no SQL of it."""
    assert re.findall(r"\bSQL\b", re.sub(r'"BAD_SQL"', "", file.read_text())) == []


def test_the_page_of_the_kernel_tells_all_of_it() -> None:
    """Every module of the kernel has its promise in docs/kernel.md, and none that is not there."""
    promised = {
        name.rstrip("/")
        for row in re.findall(r"^\| (`.+?) \|", KERNEL_PAGE.read_text(), re.MULTILINE)
        for name in re.findall(r"`(.+?)`", row)
    }
    found = [*(ROOT / "kernel").glob("*.py"), *(ROOT / "kernel").glob("*/__init__.py")]
    there = {(file.parent.name if file.stem == "__init__" else file.stem) for file in found} - {"kernel"}
    assert promised == there
