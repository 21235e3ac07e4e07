"""What the pages of the documentation show, and the places links can lead to."""

import re
from pathlib import Path
from typing import Any

from docs.generators.machines import MACHINES

from penstock.kernel.machine import StateMachine

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
_PICTURE = re.compile(r"!\[[^]]+\]\((?:\.\./)*images/machines/([\w-]+)\.svg\)")
_CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def drawn_in(text: str) -> list[StateMachine[Any]]:
    """The machines whose pictures a page shows; that the pictures are theirs is tested elsewhere."""
    return [MACHINES[name][0] for name in _PICTURE.findall(text)]


def links_of(page: Path) -> list[str]:
    """Where a page leads to within the repository, as it writes it."""
    links = _LINK.findall(_CODE.sub(lambda code: code[0][:1], page.read_text()))
    return [link for link in links if "://" not in link and not link.startswith("mailto:")]


def anchors_of(page: Path) -> set[str]:
    """What can stand after a `#`: the headings, as code hosts spell them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.+)$", outside_blocks(page.read_text()), re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {slug if number == 0 else f"{slug}-{number}" for slug, most in found.items() for number in range(most + 1)}


def outside_blocks(text: str) -> str:
    """A page without its fenced examples."""
    return _BLOCK.sub("", text)
