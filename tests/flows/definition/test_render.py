"""Drawings of flows: the drawn lines are the dependencies of the flow."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings

from penstock.flows.definition import render
from penstock.flows.definition.spec import StepSpec, WorkSpec
from tests.flows.definition.step_graphs import Steps, dags, step
from tests.support.soak import examples

UP, DOWN, LEFT, RIGHT = (-1, 0), (1, 0), (0, -1), (0, 1)
DIRECTIONS = {
    "│": (UP, DOWN), "─": (LEFT, RIGHT), "╰": (UP, RIGHT), "╯": (UP, LEFT), "╭": (DOWN, RIGHT), "╮": (DOWN, LEFT),
    "├": (UP, DOWN, RIGHT), "┤": (UP, DOWN, LEFT), "┴": (UP, LEFT, RIGHT), "┬": (DOWN, LEFT, RIGHT),
    "┼": (UP, DOWN, LEFT, RIGHT),
}  # fmt: skip
MARKET = {
    "ohlcv": step(kind="OHLCV_EXPORT"),
    "charts": step("ohlcv", kind="CHART_EXPORT", required=False),
    "report": step("ohlcv", "charts", kind="LLM_REPORT", when="steps.ohlcv.outputs.rows > 0"),
}
DRAWN = """
          ╭──────────────╮
          │ ohlcv        │
          │ OHLCV_EXPORT │
          ╰───────┬──────╯
                  ├─────╮
                  ▼     │
    ╭──────────────╮    │
    │ charts       │    │
    │ CHART_EXPORT │    │
    │ optional     │    │
    ╰───────┬──────╯    │
            ╰─────┬─────╯
                  ▼
╭───────────────────────────────────╮
│ report                            │
│ LLM_REPORT                        │
│ when steps.ohlcv.outputs.rows > 0 │
╰───────────────────────────────────╯
"""


class DrawingReader:
    """A parser of a drawing: its boxes, and the boxes that the lines of each box lead to."""

    def __init__(self, text: str) -> None:
        lines = text.split("\n")
        self.grid = {(row, column): glyph for row, line in enumerate(lines) for column, glyph in enumerate(line)}
        self.names: dict[tuple[int, int], str] = {}  # every cell of a box's upper edge
        self.leaving: list[tuple[int, int, str]] = []
        for row, line in enumerate(lines):
            for column in range(len(line)):
                if line[column : column + 2] == "╭─" and self._is_box(row, column):
                    self._read(row, column)

    def _is_box(self, row: int, column: int) -> bool:
        """Return whether a corner belongs to a box: corners of lines have no name below."""
        first = self.grid.get((row + 1, column + 2), " ")
        return self.grid.get((row + 1, column)) == "│" and (first.isalnum() or first == "…")

    def _read(self, row: int, column: int) -> None:
        right = next(c for c in range(column + 1, 10_000) if self.grid[row, c] == "╮")
        bottom = next(r for r in range(row + 1, 10_000) if self.grid[r, column] == "╰")
        name = "".join(self.grid[row + 1, c] for c in range(column + 1, right)).strip()
        for c in range(column, right + 1):
            self.names[row, c] = name
            if self.grid[bottom, c] == "┬":
                self.leaving.append((bottom, c, name))

    def edges(self) -> set[tuple[str, str]]:
        return {(name, end) for row, column, name in self.leaving for end in self._follow(row + 1, column)}

    def _follow(self, row: int, column: int) -> Iterator[str]:
        pending, seen = [(row, column, DOWN)], set()
        while pending:
            if (state := pending.pop()) in seen:
                continue
            seen.add(state)
            row, column, (down, right) = state
            glyph = self.grid[row, column]
            if glyph == "▼":
                assert (down, right) == DOWN
                yield self.names[row + 1, column]
                continue
            back = (-down, -right)
            if back not in DIRECTIONS[glyph]:  # another line crosses this line
                assert glyph == "│"
                pending.append((row + down, column + right, (down, right)))
                continue
            # Lines from other boxes join from above: do not follow them.
            directions = [direction for direction in DIRECTIONS[glyph] if direction not in (back, UP)]
            pending += [(row + direction[0], column + direction[1], direction) for direction in directions]


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@settings(max_examples=examples(60, soak=5_000))
@given(dags(most=14))
def test_lines_are_the_dependencies(steps: Steps) -> None:
    """F15: the lines of each box lead to exactly the steps that depend on it."""
    drawing = DrawingReader(render.draw_flow(steps, width=10_000))
    assert drawing.edges() == {(other, name) for name, step in steps.items() for other in step.depends_on}
    assert set(drawing.names.values()) == set(steps)


def test_a_flow_of_three_steps() -> None:
    """F15: boxes have the kind, the condition and `optional`."""
    assert render.draw_flow(MARKET).split("\n") == DRAWN.strip("\n").split("\n")


def test_a_wide_layer_is_folded() -> None:
    """F15: a wide layer is drawn in part, with the number of further steps."""
    middle = [f"load-{number}" for number in range(1_000)]
    steps = {"a": step(), **{name: step("a") for name in middle}, "z": step(*middle)}
    text = render.draw_flow(steps)
    drawing = DrawingReader(text)
    shown = {name for name in drawing.names.values() if name.startswith("load-")}
    rest = f"… and {1_000 - len(shown):,} more"
    assert 3 <= len(shown) < 12
    assert drawing.edges() == {(a, b) for name in [*shown, rest] for a, b in (("a", name), (name, "z"))}
    assert max(map(len, text.split("\n"))) <= 110


def test_large_flow_is_a_list() -> None:
    """F15: a drawing that is too wide or too long is a list of the first 200 steps with their dependencies."""
    tangle = {f"s{n}": step(*(f"s{m}" for m in range(n))) for n in range(30)}
    lines = render.draw_flow(tangle, width=80).split("\n")
    assert lines[0].split() == ["1", "s0", "(http)"]
    assert lines[-1].split("←")[1] == " s0, s1, s2, s3, s4 and 24 more"
    chain = {f"s{n}": step(*([f"s{n - 1}"] if n else [])) for n in range(5_000)}
    assert render.draw_flow(chain).split("\n")[-1].strip() == "… and 4,800 more"


def test_nothing_to_draw() -> None:
    """F15: an empty flow has an empty drawing."""
    assert render.draw_flow({}) == "(no steps)"
    assert render.draw_mermaid({}) == "flowchart TD"


def test_texts_cannot_break_a_drawing() -> None:
    """F15: a condition that is long or has control characters stays within its box."""
    steps = {"a": step(when='scope.x == "\x1b[31m" and ' + " and ".join(["scope.y"] * 50)), "b": step("a")}
    text = render.draw_flow(steps)
    assert "\x1b" not in text
    assert DrawingReader(text).edges() == {("a", "b")}


def test_a_flow_for_mermaid() -> None:
    """F15: the Mermaid chart has every step and dependency; special characters of Mermaid are escaped."""
    steps: dict[str, StepSpec] = {
        **MARKET,
        "end": step("report", kind="map", over=[1], do=WorkSpec(kind="http")),
        "x-y": step("end", kind="flow", inputs={"flow": "other"}),
    }
    assert render.draw_mermaid(steps).split("\n") == [
        "flowchart TD",
        '    s0["ohlcv<br/>OHLCV_EXPORT"]',
        '    s1["charts<br/>CHART_EXPORT<br/>optional"]:::optional',
        '    s2{{"report<br/>LLM_REPORT<br/>when steps.ohlcv.outputs.rows #62; 0"}}',
        '    s3[["end<br/>map × http"]]',
        '    s4[/"x-y<br/>flow × other"/]',
        "    s0 --> s1",
        "    s0 --> s2",
        "    s1 --> s2",
        "    s2 --> s3",
        "    s3 --> s4",
        "    classDef optional stroke-dasharray: 5 5",
    ]
