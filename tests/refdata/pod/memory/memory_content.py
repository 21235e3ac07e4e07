"""Functions to fill the memory of a pod."""

from penstock.refdata.model import DictionaryKey, VersionStamp
from penstock.refdata.pod.memory.writer import MemoryWriter

TARGET = DictionaryKey("acme", "LOOSE")
LIMIT = 16 * 1024 * 1024
Items = dict[str, str]


def load(memory: MemoryWriter, mark: VersionStamp, items: Items, target: DictionaryKey = TARGET) -> None:
    generation = memory.begin_generation()
    assert memory.fill(generation, items.items()) == len(items)
    memory.publish(target, generation, mark, len(items))


def numbered(count: int, payload: str = "1") -> Items:
    return {f"k{number}": payload for number in range(count)}
