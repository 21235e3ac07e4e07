"""How charts may look."""

from dataclasses import dataclass
from typing import NamedTuple


class Theme(NamedTuple):
    """The colours of a chart."""

    paper: str
    ink: str
    faint: str
    mark: str  # the symbol behind the candles
    grid: str
    frame: str
    up: str
    down: str
    averages: tuple[str, str]


THEMES = {
    "light": Theme(
        paper="#ffffff",
        ink="#131722",
        faint="#6a6f7d",
        mark="#f6f7f9",
        grid="#eef0f4",
        frame="#d5d9e2",
        up="#089981",
        down="#f23645",
        averages=("#2962ff", "#f57c00"),
    ),
    "dark": Theme(
        paper="#131722",
        ink="#e3e6ee",
        faint="#8a91a2",
        mark="#191e2b",
        grid="#1f2533",
        frame="#333a4b",
        up="#22ab94",
        down="#f7525f",
        averages=("#5b8cff", "#ffb74d"),
    ),
}


@dataclass(frozen=True, slots=True)
class Look:
    """How one chart is to look; *last* is how many candles it shows at most."""

    width: int = 1200
    height: int = 675
    theme: str = "light"
    title: str | None = None
    last: int | None = None
