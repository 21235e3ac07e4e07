"""The comparison of the output on a page with the output of a run."""

import pytest

from tests.support.page_output import Names

FIRST, OTHER, THIRD = "20261117T034130Z_837f2a", "20261117T034131Z_aaaaaa", "20261117T034132Z_bbbbbb"


@pytest.mark.parametrize(
    ("shown", "output", "is_equal"),
    [
        ("a\n", "a\n", True),
        ("a\n", "a\nb\n", False),
        ("a\n…\nc\n", "a\nb\nb\nc\n", True),
        ("a\n…\nc\n", "a\nb\n", False),
        ("a 12 …\n", "a 12 and more\n", True),
        ("by w@host:1  5 seconds ago\n", "by w@elsewhere:27    1 second ago\n", True),
        ("3 rows\n", "4 rows\n", False),
    ],
)
def test_outputs_are_compared_without_variable_parts(shown: str, output: str, is_equal: bool) -> None:
    """Times and process ids may differ; everything else must be equal."""
    assert Names().are_in(shown, output) is is_equal


def test_a_name_is_the_same_everywhere_on_a_page() -> None:
    """A name on the page means the same run everywhere, also in a command."""
    names = Names()
    assert names.are_in(f"PASS x_{FIRST}\nread x_{FIRST}\n", f"PASS x_{OTHER}\nread x_{OTHER}\n")
    assert names.here(f"bad-rows x_{FIRST}") == f"bad-rows x_{OTHER}"
    assert not names.are_in(f"x_{FIRST}\n", f"x_{THIRD}\n")
    assert not Names().are_in(f"x_{FIRST} x_{FIRST}\n", f"x_{OTHER} x_{THIRD}\n")
