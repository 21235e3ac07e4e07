"""The documentation of harvest agrees with the code."""

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from penstock.cli.harvest import app
from penstock.harvest.alerts import AlertCode
from penstock.harvest.api.routes import routes
from penstock.harvest.contract import PREFIX, HarvestRunState
from penstock.harvest.feed.mapping import FeedMapping
from penstock.harvest.model import PARTITION, PLAN, RUN
from penstock.settings import load_settings
from tests.pages import drawn_in

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "harvest.md").read_text()
EXAMPLE = ROOT / "examples" / "diamonds"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_diagrams_are_those_of_the_state_machines() -> None:
    """H1: the diagrams of docs/harvest.md are drawn from the declared state machines."""
    assert drawn_in(PAGE) == [PLAN, RUN, PARTITION]


def test_configuration_of_the_page_is_valid(tmp_path: Path) -> None:
    """H14: the configuration and its pricing rules are valid."""
    (tmp_path / "penstock.yaml").write_text(_blocks("yaml")[0])
    harvest = load_settings(tmp_path / "penstock.yaml", {}).harvest
    assert [rule.name for rule in FeedMapping.from_feed(harvest.feeds["stones"]).rules] == ["round"]
    assert harvest.alerts.email is not None


def test_example_is_valid() -> None:
    """H14: the feed of the example and its pricing rules are valid."""
    feed = load_settings(EXAMPLE / "penstock.yaml", {}).harvest.feeds["diamonds"]
    assert FeedMapping.from_feed(feed).rules[-1].conditions == ()


def test_page_and_example_have_the_same_dictionary() -> None:
    """R2: the excerpt on the page is part of the example."""
    _, block = _blocks("yaml")
    shown, whole = (YAML(typ="safe").load(text) for text in (block, (EXAMPLE / "penstock.yaml").read_text()))
    assert shown["refdata"] == whole["refdata"]
    assert shown["harvest"]["feeds"]["diamonds"].items() <= whole["harvest"]["feeds"]["diamonds"].items()


def test_example_and_readme_have_the_same_commands() -> None:
    """H17: the commands for the simulator are the same in both files."""
    commands = re.findall(r"^#   (.+)$", (EXAMPLE / "penstock.yaml").read_text(), re.MULTILINE)
    readme = re.findall(r"^\$ (.+?)(?:  +#.*)?$", (EXAMPLE / "README.md").read_text(), re.MULTILINE)
    assert commands == readme[:3]


def test_links_of_the_readme_exist() -> None:
    """H17: every relative link is a file of the repository."""
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", (EXAMPLE / "README.md").read_text())
    assert targets
    assert [target for target in targets if not (EXAMPLE / target).exists()] == []


def test_every_command_is_documented() -> None:
    """H13: docs/harvest.md has a row for each command, and for no other."""
    commands = {(command.name or command.callback.__name__) for command in app.registered_commands if command.callback}
    assert set(re.findall(r"^\| `harvest ([a-z]+)", PAGE, re.MULTILINE)) == commands


def test_every_route_is_documented() -> None:
    """H13: docs/harvest.md contains the last word of each path."""
    paths = [getattr(route, "path", "").removeprefix(PREFIX) for route in routes.routes]
    assert [path for path in paths if f"/{path.rsplit('/', 1)[-1]}" not in PAGE] == []


@pytest.mark.parametrize("names", [HarvestRunState, AlertCode])
def test_every_state_and_alert_is_documented(names: type[HarvestRunState] | type[AlertCode]) -> None:
    """H1, H12: docs/harvest.md explains each state and each alert."""
    assert [name.value for name in names if f"`{name.value}`" not in PAGE] == []
