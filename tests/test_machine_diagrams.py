"""The pictures of state machines show what the code declares, and can be read."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from enum import StrEnum
from itertools import combinations, pairwise
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
from docs.generators.diagram import draw
from docs.generators.machines import MACHINES
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.kernel.machine import StateMachine, Transition

pytestmark = pytest.mark.docs

_SVG = "{http://www.w3.org/2000/svg}"
_STEPS = 20


def test_every_machine_is_drawn() -> None:
    """No machine of a part is left out."""
    models = [f"penstock.{part.name}.model" for part in pkgutil.iter_modules(penstock.__path__) if part.ispkg]
    known = [name for name in models if importlib.util.find_spec(name)]
    values = [value for name in known for value in vars(importlib.import_module(name)).values()]
    inner = [nested for value in values if isinstance(value, dict) for nested in value.values()]
    found = {value.name for value in [*values, *inner] if isinstance(value, StateMachine)}
    assert found == {machine.name for alike in MACHINES.values() for machine in alike}


@pytest.mark.parametrize("name", MACHINES)
def test_machines_of_one_picture_are_alike(name: str) -> None:
    """A diagram of several machines is the diagram of each."""
    assert len({draw(machine, name) for machine in MACHINES[name]}) == 1


@pytest.mark.parametrize("name", MACHINES)
def test_a_picture_tells_all(name: str) -> None:
    """Every state and every move by its name, final states with two borders, and one beginning."""
    machine = MACHINES[name][0]
    picture = ElementTree.fromstring(draw(machine, name))
    boxes = {"".join(group.itertext()): len(group.findall(f"{_SVG}rect")) for group in picture.iter(f"{_SVG}g")}
    assert boxes == {state.value: 1 + (state in machine.finals) for state in machine.states}
    assert [text.text for text in picture.findall(f"{_SVG}text")] == list(machine.moves)
    assert len(picture.findall(f"{_SVG}circle")) == 1


class Letter(StrEnum):
    """States of machines made up by chance."""

    A = "A"
    B = "B_LONGER"
    C = "c"
    D = "the_longest_of_all"
    E = "E"


@st.composite
def machines(chance: Any) -> StateMachine[Letter]:
    """Any machine of five states, all of which can be reached."""
    letters = list(Letter)
    moves = [
        Transition(f"move_{place}", (chance(st.sampled_from(letters[: place + 1])),), target)
        for place, target in enumerate(letters[1:])
    ]
    more = st.lists(st.tuples(st.sets(st.sampled_from(letters), min_size=1), st.sampled_from(letters)), max_size=4)
    moves += [
        Transition(f"more_{place}", tuple(sorted(sources - {target})), target)
        for place, (sources, target) in enumerate(chance(more))
        if sources - {target}
    ]
    return StateMachine("made up", Letter, initial=Letter.A, moves=moves)


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(machine=machines())
def test_nothing_lies_over_a_state_or_a_name(machine: StateMachine[Letter]) -> None:
    """Whatever the machine: states and names lie apart, within the picture, and no line runs through them."""
    picture = ElementTree.fromstring(draw(machine, "made up"))
    areas = [*_states(picture), *_names(picture)]
    assert [pair for pair in combinations(areas, 2) if pair[0].meets(pair[1])] == []
    whole = Area("picture", 0, 0, float(picture.attrib["width"]), float(picture.attrib["height"]))
    assert [area for area in areas if not whole.holds(area)] == []
    points = [point for path in picture.iter(f"{_SVG}path") if "class" not in path.attrib for point in _points(path)]
    assert [(area, x, y) for area in areas for x, y in points if area.has(x, y)] == []


class Area(NamedTuple):
    """The states of a test."""

    what: str
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Area") -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def holds(self, other: "Area") -> bool:
        return (
            self.left <= other.left
            and self.top <= other.top
            and other.right <= self.right
            and other.bottom <= self.bottom
        )

    def has(self, x: float, y: float) -> bool:
        return self.left + 1 < x < self.right - 1 and self.top + 1 < y < self.bottom - 1


def _states(picture: ElementTree.Element) -> Iterator[Area]:
    for group in picture.iter(f"{_SVG}g"):
        box = group.findall(f"{_SVG}rect")[-1].attrib
        x, y = float(box["x"]), float(box["y"])
        yield Area("".join(group.itertext()), x, y, x + float(box["width"]), y + float(box["height"]))


def _names(picture: ElementTree.Element) -> Iterator[Area]:
    for text in picture.findall(f"{_SVG}text"):
        x, y, name = float(text.attrib["x"]), float(text.attrib["y"]), str(text.text)
        yield Area(name, x, y - 9, x + 7.2 * len(name), y + 3)


def _points(path: ElementTree.Element) -> Iterator[tuple[float, float]]:
    """Points along a path, close to each other."""
    here = (0.0, 0.0)
    for command, numbers in re.findall(r"([MHLQC])([-\d. ]+)", path.attrib["d"]):
        given_ = [float(number) for number in numbers.split()]
        ends = [(given_[0], here[1])] if command == "H" else list(zip(given_[::2], given_[1::2], strict=True))
        if command != "M":
            yield from (_at([here, *ends], step / _STEPS) for step in range(_STEPS + 1))
        here = ends[-1]


def _at(points: list[tuple[float, float]], part: float) -> tuple[float, float]:
    """The point of a Bézier curve of any degree."""
    while len(points) > 1:
        points = [(a + (c - a) * part, b + (d - b) * part) for (a, b), (c, d) in pairwise(points)]
    return points[0]
