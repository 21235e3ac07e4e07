"""`make docs`: the pages become a site that needs nothing but itself."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

DOCS = Path(__file__).parent.parent / "docs"
_LOADS = re.compile(r"<(?:script|link|img|iframe|source|object|video)\b[^>]*?(?:src|href)=\"((?:https?:)?//[^\"]+)\"")
_STYLES = re.compile(r"(?:@import|url\()\s*[\"']?((?:https?:)?//[^\"')]+)")


def build(builder: str, pages: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """As strictly as `make docs` does it."""
    strict = ["-q", "-E", "-W", "--keep-going", "-b", builder, "-d", str(site.parent / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *strict, str(pages), str(site)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def small(tmp_path: Path, text: str) -> Path:
    """A site of two pages, with our settings."""
    pages = tmp_path / "docs"
    shutil.copytree(DOCS / "static", pages / "static")
    shutil.copy(DOCS / "conf.py", pages)
    (pages / "index.md").write_text(f"# Here\n\n{text}\n")
    (pages / "other.md").write_text("# Other\n")
    return pages


@pytest.mark.full
def test_every_page_is_reached_and_leads_somewhere(tmp_path: Path) -> None:
    """All pages are in the contents, and all their links, anchors and pictures are there."""
    built = build("dummy", DOCS, tmp_path / "site")  # it checks all, and writes nothing
    assert (built.returncode, built.stderr) == (0, "")


def test_what_leads_nowhere_fails_it(tmp_path: Path) -> None:
    """A missing page, anchor, picture or file, and a page without a link to it, are reported and fail the build."""
    links = ["gone.md", "other.md#lost", "#missing", "../absent.yaml"]
    pages = small(tmp_path, "".join(f"- [x]({link})\n" for link in links) + "\n![x](unseen.svg)\n\n[other](other.md)")
    (pages / "alone.md").write_text("# Alone\n")
    built = build("dummy", pages, tmp_path / "site")
    assert built.returncode != 0
    expected = [
        "gone.md",
        "'lost'",
        "'missing'",
        "absent.yaml",
        "unseen.svg",
        "alone.md: WARNING: document isn't included",
    ]
    assert [word for word in expected if word not in built.stderr] == []


def test_a_site_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """Scripts, styles, fonts and the search come along; what lies outside docs/ is copied, or named."""
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "rules.yaml").write_text("groups: []\n")
    pages = small(tmp_path, "[other](other.md), [rules](../deploy/rules.yaml), [all](../deploy)")
    built = build("html", pages, tmp_path / "site")
    assert (built.returncode, built.stderr) == (0, "")
    site = tmp_path / "site"
    assert {load for page in site.rglob("*.html") for load in _LOADS.findall(page.read_text())} == set()
    assert {load for style in site.rglob("*.css") for load in _STYLES.findall(style.read_text())} == set()
    assert (site / "searchindex.js").exists()
    assert [file.read_text() for file in site.rglob("rules.yaml")] == ["groups: []\n"]
    assert "all (<code" in (site / "index.html").read_text()
