"""The memory of a pod for tests, and what is in it."""

from penstock.refdata.model import Dict, Mark
from penstock.refdata.pod.memory.writer import Memory

TARGET = Dict("acme", "LOOSE")
LIMIT = 16 * 1024 * 1024
Items = dict[str, str]


def load(held: Memory, mark: Mark, items: Items, target: Dict = TARGET) -> None:
    generation = held.begin()
    assert held.fill(generation, items.items()) == len(items)
    held.publish(target, generation, mark, len(items))


def numbered(count: int, payload: str = "1") -> Items:
    return {f"k{number}": payload for number in range(count)}
