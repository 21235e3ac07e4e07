"""`make docs`: the pages become a site that needs nothing but itself."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
_LOADS = re.compile(r"<(?:script|link|img|iframe|source|object|video)\b[^>]*?(?:src|href)=\"((?:https?:)?//[^\"]+)\"")
_STYLES = re.compile(r"(?:@import|url\()\s*[\"']?((?:https?:)?//[^\"')]+)")


def build(pages: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` does it."""
    strict = ["-q", "-E", "-W", "--keep-going", "-b", "html", "-d", str(site.parent / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *strict, str(pages), str(site)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_the_site_is_whole_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """Every page can be reached, every link leads somewhere; scripts, styles, fonts and pictures come along."""
    built = build(DOCS, tmp_path / "site")
    assert (built.returncode, built.stderr) == (0, "")
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 60
    assert {load for page in pages for load in _LOADS.findall(page.read_text())} == set()
    styles = (tmp_path / "site").rglob("*.css")
    assert {load for style in styles for load in _STYLES.findall(style.read_text())} == set()
    assert (tmp_path / "site" / "searchindex.js").exists()


def test_what_leads_nowhere_fails_it(tmp_path: Path) -> None:
    """A page, an anchor, a picture or a file that is not there, and a page nobody links to, are told and fail it."""
    pages = tmp_path / "docs"
    shutil.copytree(DOCS / "static", pages / "static")
    shutil.copy(DOCS / "conf.py", pages)
    links = ["gone.md", "other.md#lost", "#missing", "../absent.yaml"]
    linked = "".join(f"- [x]({link})\n" for link in links)
    (pages / "index.md").write_text(f"# Here\n\n{linked}\n![x](unseen.svg)\n\n[other](other.md)\n")
    (pages / "other.md").write_text("# Other\n")
    (pages / "alone.md").write_text("# Alone\n")
    built = build(pages, tmp_path / "site")
    assert built.returncode != 0
    told = ["gone.md", "'lost'", "'missing'", "absent.yaml", "unseen.svg", "alone.md: WARNING: document isn't included"]
    assert [word for word in told if word not in built.stderr] == []
