"""Which modules `make quick` does not import."""

from pathlib import Path

import pytest

from tests.support.purity import has_no_quick_tests


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import subprocess\n", True),
        ("import json\nfrom tests.support.processes import Up\n", True),
        ("import pytest\n\npytestmark = pytest.mark.docs\n", True),
        ("import json\n", False),
        ("from tests.support.crash_report import page\n", False),
        ("def test_it() -> None:\n    import subprocess\n", False),
    ],
)
def test_a_module_that_starts_processes_is_left_out(tmp_path: Path, source: str, expected: bool) -> None:
    """An import at the top of the file decides; so does the mark of tests of the documentation."""
    (file := tmp_path / "test_it.py").write_text(source)
    assert has_no_quick_tests(file) is expected


def test_no_quick_test_is_left_out(request: pytest.FixtureRequest) -> None:
    """A module that `make quick` does not import has no test that the marks would let it run."""
    marks = ("server", "full", "docs")
    wrong = [
        item.nodeid
        for item in request.session.items
        if has_no_quick_tests(item.path) and not any(item.get_closest_marker(mark) for mark in marks)
    ]
    assert wrong == []
