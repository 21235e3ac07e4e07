"""Functions to fill the memory of a pod."""

from penstock.refdata.model import DictionaryKey, VersionStamp
from penstock.refdata.pod.memory.writer import MemoryWriter

TARGET = DictionaryKey("acme", "LOOSE")
LIMIT = 16 * 1024 * 1024
Items = dict[str, str]


def load(held: MemoryWriter, mark: VersionStamp, items: Items, target: DictionaryKey = TARGET) -> None:
    generation = held.begin_generation()
    assert held.fill(generation, items.items()) == len(items)
    held.publish(target, generation, mark, len(items))


def numbered(count: int, payload: str = "1") -> Items:
    return {f"k{number}": payload for number in range(count)}
