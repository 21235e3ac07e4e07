"""What a reader of the memory of a pod sees: one version throughout, page by page."""

import subprocess
import sys
from pathlib import Path

from penstock.refdata.model import Dict, Mark
from penstock.refdata.pod.memory import layout
from penstock.refdata.pod.memory.reader import PageAt, View
from penstock.refdata.pod.memory.writer import Memory
from tests.refdata.pod.memory.held_memory import LIMIT, TARGET, load, numbered

READER = """
import sys
from pathlib import Path

from penstock.refdata.model import Dict
from penstock.refdata.pod.memory import layout
from penstock.refdata.pod.memory.shared_counters import State
from penstock.refdata.pod.memory.reader import PageAt, View

folder, limit, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
target, seen, versions = Dict("acme", "LOOSE"), State(folder).counters(0), set()
with View.open(folder, limit) as view:
    while True:
        view.renew()
        shelf = view.shelf(target)
        keys = [b"k%d" % number for number in range(100 if shelf.version % 2 else 60)]
        found = [view.get(shelf, key) for key in keys]
        assert {layout.body_of(one) for one in found} == {b"%d" % shelf.version}, "a mixture"
        assert shelf.items == len(keys) and view.get(shelf, b"k%d" % len(keys)) is None, "another's items"
        page = view.page(target, PageAt(shelf.mark), 30, 10**6)
        view.renew()
        rest = view.page(target, PageAt(shelf.mark, page[-1][0]), 1_000, 10**6)
        if rest is not None:
            assert sorted(layout.key_of(*one) for one in page + rest) == sorted(keys), "pages of two versions"
            assert {layout.body_of(one[1]) for one in page + rest} == {b"%d" % shelf.version}, "pages mixed"
        versions.add(shelf.version)
        seen[0] = len(versions)
        if shelf.version == last:
            break
"""


def test_a_view_stays_as_it_was_until_it_is_renewed(held: Memory, view: View) -> None:
    """R18: a request sees one version throughout, of a change, of a full load, and of a drop."""
    load(held, Mark(1, 1), {"a": "1", "b": "1"})
    view.renew()
    shelf = view.shelf(TARGET)
    assert shelf is not None
    held.change(TARGET, Mark(2, 2), {"a": "2"}, ["b"])
    load(held, Mark(3, 3), {"a": "3"})
    held.drop(TARGET)
    while held.free():
        pass
    assert view.shelf(TARGET) == shelf
    found = [view.get(shelf, key) for key in (b"a", b"b")]
    assert [one and layout.body_of(one) for one in found] == [b"1", b"1"]
    view.renew()
    assert view.shelf(TARGET) is None


def test_another_process_never_sees_a_mixture(tmp_path: Path) -> None:
    """R18, R29: full loads and changes of every item, hundreds of them: each look finds one version, and all of it."""
    last = 10**9
    held = Memory(tmp_path, limit=LIMIT, pages_for=0.0)
    load(held, Mark(1, 1), numbered(100, "1"))
    command = [sys.executable, "-c", READER, str(tmp_path), str(LIMIT), str(last)]
    seen, version = held.state.counters(0), 1
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as reader:
        while (version < 600 or seen[0] < 50) and reader.poll() is None:
            version += 2
            load(held, Mark(version, version), numbered(100, str(version)))
            gone = [f"k{number}" for number in range(60, 100)]
            held.change(TARGET, Mark(version + 1, 1), numbered(60, str(version + 1)), gone)
            held.free()
        load(held, Mark(last, last), numbered(60, str(last)))
        assert reader.communicate()[1] == ""
    assert reader.returncode == 0
    seen.release()
    held.close()


def test_pages_of_another_dictionary_are_gone(held: Memory, view: View) -> None:
    """R17: a cursor that was made elsewhere, or by nobody, leads nowhere."""
    load(held, Mark(1, 1), {"a": "1"})
    load(held, Mark(2, 2), {"b": "1"}, Dict("globex", "LOOSE"))
    view.renew()
    assert view.page(TARGET, PageAt(Mark(1, 1)), 10, 10)
    for mark in (Mark(2, 2), Mark(1, 2), Mark(0, 1), Mark(2, 1), Mark(2**62, 1)):
        assert view.page(TARGET, PageAt(mark), 10, 10) is None
    assert view.page(Dict("nobody", "LOOSE"), PageAt(Mark(1, 1)), 10, 10) is None
