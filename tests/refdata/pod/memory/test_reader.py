"""R18: readers of the memory see one version, also over pages."""

import subprocess
import sys
from pathlib import Path

from penstock.refdata.model import DictionaryKey, VersionStamp
from penstock.refdata.pod.memory import layout
from penstock.refdata.pod.memory.reader import MemoryView, PageCursor
from penstock.refdata.pod.memory.writer import MemoryWriter
from tests.refdata.pod.memory.memory_content import LIMIT, TARGET, load, numbered

READER = """
import sys
from pathlib import Path

from penstock.refdata.model import DictionaryKey
from penstock.refdata.pod.memory import layout
from penstock.refdata.pod.memory.shared_counters import PodCounters
from penstock.refdata.pod.memory.reader import PageCursor, MemoryView

folder, limit, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
target, counters, versions = DictionaryKey("acme", "LOOSE"), PodCounters(folder).get_process_counters(0), set()
with MemoryView.open(folder, limit) as view:
    while True:
        view.refresh()
        header = view.read_header(target)
        keys = [b"k%d" % number for number in range(100 if header.version % 2 else 60)]
        responses = [view.get(header, key) for key in keys]
        assert {layout.read_body(response) for response in responses} == {b"%d" % header.version}, "a mixture"
        assert header.items == len(keys) and view.get(header, b"k%d" % len(keys)) is None, "items of another version"
        page = view.read_page(target, PageCursor(header.mark), 30, 10**6)
        view.refresh()
        rest = view.read_page(target, PageCursor(header.mark, page[-1][0]), 1_000, 10**6)
        if rest is not None:
            assert sorted(layout.decode_key(*item) for item in page + rest) == sorted(keys), "pages of two versions"
            assert {layout.read_body(item[1]) for item in page + rest} == {b"%d" % header.version}, "mixed pages"
        versions.add(header.version)
        counters[0] = len(versions)
        if header.version == last:
            break
"""


def test_a_view_is_stable_until_refreshed(memory: MemoryWriter, view: MemoryView) -> None:
    """R18: a view does not see changes, full loads or drops before it is refreshed."""
    load(memory, VersionStamp(1, 1), {"a": "1", "b": "1"})
    view.refresh()
    header = view.read_header(TARGET)
    assert header is not None
    memory.change_items(TARGET, VersionStamp(2, 2), {"a": "2"}, ["b"])
    load(memory, VersionStamp(3, 3), {"a": "3"})
    memory.drop(TARGET)
    while memory.free():
        pass
    assert view.read_header(TARGET) == header
    found = [view.get(header, key) for key in (b"a", b"b")]
    assert [response and layout.read_body(response) for response in found] == [b"1", b"1"]
    view.refresh()
    assert view.read_header(TARGET) is None


def test_another_process_never_sees_a_mixture(tmp_path: Path) -> None:
    """R18, R29: during full loads and changes, each view of another process has all items of one version."""
    last = 10**9
    memory = MemoryWriter(tmp_path, limit=LIMIT, page_retention=0.0)
    load(memory, VersionStamp(1, 1), numbered(100, "1"))
    command = [sys.executable, "-c", READER, str(tmp_path), str(LIMIT), str(last)]
    seen, version = memory.counters.get_process_counters(0), 1
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as reader:
        while (version < 600 or seen[0] < 50) and reader.poll() is None:
            version += 2
            load(memory, VersionStamp(version, version), numbered(100, str(version)))
            gone = [f"k{number}" for number in range(60, 100)]
            memory.change_items(TARGET, VersionStamp(version + 1, 1), numbered(60, str(version + 1)), gone)
            memory.free()
        load(memory, VersionStamp(last, last), numbered(60, str(last)))
        assert reader.communicate()[1] == ""
    assert reader.returncode == 0
    seen.release()
    memory.close()


def test_a_cursor_of_another_dictionary_is_refused(memory: MemoryWriter, view: MemoryView) -> None:
    """R17: a foreign or forged cursor returns no page."""
    load(memory, VersionStamp(1, 1), {"a": "1"})
    load(memory, VersionStamp(2, 2), {"b": "1"}, DictionaryKey("globex", "LOOSE"))
    view.refresh()
    assert view.read_page(TARGET, PageCursor(VersionStamp(1, 1)), 10, 10)
    for mark in (
        VersionStamp(2, 2),
        VersionStamp(1, 2),
        VersionStamp(0, 1),
        VersionStamp(2, 1),
        VersionStamp(2**62, 1),
    ):
        assert view.read_page(TARGET, PageCursor(mark), 10, 10) is None
    assert view.read_page(DictionaryKey("unknown", "LOOSE"), PageCursor(VersionStamp(1, 1)), 10, 10) is None
