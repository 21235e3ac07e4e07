"""How `make docs` makes one site of these pages, which stay plain Markdown for any code host."""

import re
from pathlib import Path

from sphinx.application import Sphinx

from penstock import __version__

DOCS = Path(__file__).parent
_LINK = re.compile(r"\[([^]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)

project = "Penstock"
html_title = f"Penstock {__version__}"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
extensions = ["myst_parser"]
myst_enable_extensions = ["tasklist"]
myst_heading_anchors = 4
highlight_language = "none"
suppress_warnings = ["misc.highlighting_failure"]  # examples may leave something out: `…`


def setup(app: Sphinx) -> None:
    app.connect("source-read", _prepare)


def _prepare(_: Sphinx, name: str, source: list[str]) -> None:
    page = DOCS / f"{name}.md"
    source[0] = _LINK.sub(lambda link: _reachable(page, link), source[0]) + _contents(page, source[0])


def _reachable(page: Path, link: re.Match[str]) -> str:
    """A link to a file outside docs/ gets a copy of it, one to a folder tells where in the repository it is."""
    text, target = link[1], (page.parent / link[2]).resolve()
    if target.is_relative_to(DOCS):
        return link[0]
    place = f"`{target.relative_to(DOCS.parent)}`"
    if target.is_dir():
        return text if text.strip("`/") == place.strip("`") else f"{text} ({place})"
    return f"[{text}](path:{link[2]})"


def _contents(page: Path, text: str) -> str:
    """The branches below a page that leads to others: its own links, a branch for each heading."""
    if page.stem not in ("index", "README"):
        return ""
    first, *headed = _HEADING.split(text)
    branches, known = [], {page}
    for caption, section in [("", first), *zip(headed[::2], headed[1::2], strict=True)]:
        below = dict.fromkeys(page.parent / link[2] for link in _LINK.finditer(section) if link[2].endswith(".md"))
        fresh = [one for one in below if one.is_relative_to(page.parent) and ".." not in one.parts and one not in known]
        known.update(fresh)
        branches.append(_branch(page, caption, fresh))
    return "".join(branches)


def _branch(page: Path, caption: str, below: list[Path]) -> str:
    if not below:
        return ""
    names = "\n".join(str(one.relative_to(page.parent).with_suffix("")) for one in below)
    options = ":hidden:\n" + (f":caption: {caption}\n" if caption else "")
    return f"\n\n```{{toctree}}\n{options}\n{names}\n```\n"
