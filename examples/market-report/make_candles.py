"""Write candles.csv: hourly candles of two invented symbols for thirty weeks; the result is always the same."""

import math
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

FILE = Path(__file__).parent / "candles.csv"
BEGIN, WEEKS = datetime(2026, 1, 5, tzinfo=UTC), 30
HALT = range(1_800, 1_812)  # hours without trades of TIDE
# Phases of the market: length in hours, drift per hour, volatility.
TIDE = [
    (420, 0.00045, 0.0042),
    (260, -0.0004, 0.0038),
    (40, -0.0052, 0.0110),
    (300, 0.0007, 0.0060),
    (460, 0.00005, 0.0028),
    (520, 0.00062, 0.0040),
    (60, 0.0030, 0.0090),
    (380, -0.00035, 0.0050),
    (900, 0.00025, 0.0038),
    (300, 0.0, 0.0030),
]
EMBER = [
    (700, -0.0003, 0.0060),
    (120, 0.0045, 0.0140),
    (500, -0.0009, 0.0080),
    (900, 0.0001, 0.0040),
    (1_400, 0.0004, 0.0055),
]
INVALID = {  # invalid rows: an export counts them and continues
    900: "2026-02-31T10:00:00Z,TIDE,101.0,101.5,100.2,100.9,1200",
    2_000: "2026-04-30T08:00:00Z,TIDE,118.0,117.0,119.0,118.2,900",
    3_100: "2026-07-06T11:00:00Z,TIDE,n/a,n/a,n/a,n/a,0",
}


def hours() -> Iterator[datetime]:
    """Yield the trading hours: all hours of weekdays."""
    for hour in range(WEEKS * 7 * 24):
        at = BEGIN + timedelta(hours=hour)
        if at.weekday() < 5:
            yield at


def rows(symbol: str, price: float, phases: list[tuple[int, float, float]], seed: int, decimals: int) -> Iterator[str]:
    """Yield the candles of a symbol: phases of volatility, busy afternoons, and volume that follows the moves."""
    chance, heat, n = random.Random(seed), 1.0, 0
    moves = [phase for length, *phase in phases for _ in range(length)]
    for n, (at, (drift, restless)) in enumerate(zip(hours(), moves, strict=False)):
        busy = 0.55 + 0.75 * math.exp(-(((at.hour - 14) / 5) ** 2))
        heat = 0.93 * heat + 0.07 * abs(chance.gauss(0, 1.25)) + (2.2 if chance.random() < 0.004 else 0)
        spread = restless * busy * heat
        opened, path = price, [price]
        for _ in range(6):
            price *= math.exp(chance.gauss(drift / 6, spread / math.sqrt(6)))
            path.append(price)
        volume = 900 * busy * (0.5 + heat) * (1 + 90 * abs(math.log(price / opened))) * chance.lognormvariate(0, 0.25)
        if symbol != "TIDE" or n not in HALT:
            prices = ",".join(f"{value:.{decimals}f}" for value in (opened, max(path), min(path), price))
            yield f"{at:%Y-%m-%dT%H:%MZ},{symbol},{prices},{volume:.0f}"
        price = round(price, decimals) * math.exp(chance.gauss(0, 0.0004))


def main() -> None:
    """Write the file."""
    lines = [*rows("TIDE", 96.4, TIDE, 11, 2), *rows("EMBER", 4.62, EMBER, 7, 3)]
    for index, line in INVALID.items():
        lines.insert(index, line)
    FILE.write_text("\n".join(["time,symbol,open,high,low,close,volume", *lines, ""]))


if __name__ == "__main__":
    main()
