"""How a page's output is compared, so that a page that is wrong is found out."""

import pytest

from tests.support.page_output import Names

FIRST, OTHER, THIRD = "20261117T034130Z_837f2a", "20261117T034131Z_aaaaaa", "20261117T034132Z_bbbbbb"


@pytest.mark.parametrize(
    ("shown", "told", "is_so"),
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
def test_what_is_shown_is_compared_by_what_stays(shown: str, told: str, is_so: bool) -> None:
    """Times and process numbers differ each time; all else must be as it is shown."""
    assert Names().are_in(shown, told) is is_so


def test_a_name_stays_the_same_all_along() -> None:
    """What the page calls one run is one run, also when the page types it."""
    names = Names()
    assert names.are_in(f"PASS x_{FIRST}\nread x_{FIRST}\n", f"PASS x_{OTHER}\nread x_{OTHER}\n")
    assert names.here(f"bad-rows x_{FIRST}") == f"bad-rows x_{OTHER}"
    assert not names.are_in(f"x_{FIRST}\n", f"x_{THIRD}\n")
    assert not Names().are_in(f"x_{FIRST} x_{FIRST}\n", f"x_{OTHER} x_{THIRD}\n")
