"""Configuration of `make docs`, which builds a site from these plain Markdown pages."""

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
suppress_warnings = ["misc.highlighting_failure"]  # examples may contain `…`


def setup(app: Sphinx) -> None:
    app.connect("source-read", _prepare)


def _prepare(_: Sphinx, name: str, source: list[str]) -> None:
    page = DOCS / f"{name}.md"
    source[0] = _LINK.sub(lambda link: _resolve_link(page, link), source[0]) + _contents(page, source[0])


def _resolve_link(page: Path, link: re.Match[str]) -> str:
    """Return a link that works on the site: a copy of a file outside docs/, the path of a folder as text."""
    text, target = link[1], (page.parent / link[2]).resolve()
    if target.is_relative_to(DOCS):
        return link[0]
    path = f"`{target.relative_to(DOCS.parent)}`"
    if target.is_dir():
        return text if text.strip("`/") == path.strip("`") else f"{text} ({path})"
    return f"[{text}](path:{link[2]})"


def _contents(page: Path, text: str) -> str:
    """Return the navigation below an index page: its links, grouped by heading."""
    if page.stem not in ("index", "README"):
        return ""
    first, *headed = _HEADING.split(text)
    branches, known = [], {page}
    for caption, section in [("", first), *zip(headed[::2], headed[1::2], strict=True)]:
        below = dict.fromkeys(page.parent / link[2] for link in _LINK.finditer(section) if link[2].endswith(".md"))
        fresh = [
            file for file in below if file.is_relative_to(page.parent) and ".." not in file.parts and file not in known
        ]
        known.update(fresh)
        branches.append(_branch(page, caption, fresh))
    return "".join(branches)


def _branch(page: Path, caption: str, below: list[Path]) -> str:
    if not below:
        return ""
    names = "\n".join(str(file.relative_to(page.parent).with_suffix("")) for file in below)
    options = ":hidden:\n" + (f":caption: {caption}\n" if caption else "")
    return f"\n\n```{{toctree}}\n{options}\n{names}\n```\n"
