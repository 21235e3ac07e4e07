"""The documents of harvest say what the code does."""

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from penstock.cli.harvest import app
from penstock.harvest.alerts import AlertCode
from penstock.harvest.api.routes import routes
from penstock.harvest.contract import PREFIX, HarvestRunState
from penstock.harvest.feed.recipe import FeedMapping
from penstock.harvest.model import PARTITION, PLAN, RUN
from penstock.settings import load_settings
from tests.pages import drawn_in

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "harvest.md").read_text()
EXAMPLE = ROOT / "examples" / "diamonds"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_diagrams_are_the_machines() -> None:
    """What docs/harvest.md draws is what the code declares."""
    assert drawn_in(PAGE) == [PLAN, RUN, PARTITION]


def test_the_example_of_a_configuration_loads(tmp_path: Path) -> None:
    """H14: it is valid as it stands, and so are its rules."""
    (tmp_path / "penstock.yaml").write_text(_blocks("yaml")[0])
    harvest = load_settings(tmp_path / "penstock.yaml", {}).harvest
    assert [rule.name for rule in FeedMapping.of(harvest.feeds["stones"]).rules] == ["round"]
    assert harvest.alerts.email is not None


def test_the_diamonds_load() -> None:
    """H14: the feed of the example is valid, and so are its rules."""
    feed = load_settings(EXAMPLE / "penstock.yaml", {}).harvest.feeds["diamonds"]
    assert FeedMapping.of(feed).rules[-1].conditions == ()


def test_the_dictionary_of_the_diamonds_is_that_of_the_page() -> None:
    """R2: what the page shows of it is what the example has."""
    _, block = _blocks("yaml")
    shown, whole = (YAML(typ="safe").load(text) for text in (block, (EXAMPLE / "penstock.yaml").read_text()))
    assert shown["refdata"] == whole["refdata"]
    assert shown["harvest"]["feeds"]["diamonds"].items() <= whole["harvest"]["feeds"]["diamonds"].items()


def test_the_commands_of_the_example_are_those_of_its_readme() -> None:
    """H17: what is tried with the local source is written the same in both places."""
    tried = re.findall(r"^#   (.+)$", (EXAMPLE / "penstock.yaml").read_text(), re.MULTILINE)
    readme = re.findall(r"^\$ (.+?)(?:  +#.*)?$", (EXAMPLE / "README.md").read_text(), re.MULTILINE)
    assert tried == readme[:3]


def test_the_links_of_the_examples_readme_lead_somewhere() -> None:
    """Every relative link is a file of the repository."""
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", (EXAMPLE / "README.md").read_text())
    assert targets
    assert [target for target in targets if not (EXAMPLE / target).exists()] == []


def test_every_command_is_documented() -> None:
    """H13: docs/harvest.md has a row for each, and names no other."""
    known = {(command.name or command.callback.__name__) for command in app.registered_commands if command.callback}
    assert set(re.findall(r"^\| `harvest ([a-z]+)", PAGE, re.MULTILINE)) == known


def test_every_route_is_documented() -> None:
    """H13: docs/harvest.md names the last word of each path."""
    paths = [getattr(route, "path", "").removeprefix(PREFIX) for route in routes.routes]
    assert [path for path in paths if f"/{path.rsplit('/', 1)[-1]}" not in PAGE] == []


@pytest.mark.parametrize("names", [HarvestRunState, AlertCode])
def test_every_state_and_alert_is_documented(names: type[HarvestRunState] | type[AlertCode]) -> None:
    """H1, H12: docs/harvest.md says of each what it means."""
    assert [name.value for name in names if f"`{name.value}`" not in PAGE] == []
