"""What is verified of the files of a tree, and how damage is told."""

from collections.abc import Callable

import pytest

from penstock.ingest.run.publish import PublishStep
from penstock.ingest.state.verify import verify_suppliers
from penstock.ingest.tree import paths as layout
from tests.ingest.harness import KEYED, SUPPLIER, IngestHarness, snapshot
from tests.ingest.state.damage import ONE, THREE, TWO, lose_state, run_killed


def problems(harness: IngestHarness) -> dict[str, str]:
    return {
        one.path: one.problem for one in verify_suppliers(harness.tree, harness.tree.list_suppliers()) if one.problem
    }


def changed(harness: IngestHarness, path: str, change: Callable[[bytes], bytes]) -> None:
    file = harness.root / path
    content = file.read_bytes()
    file.parent.chmod(0o755)
    file.unlink()  # facts have two names: each is damaged alone
    file.write_bytes(change(content))


def one_byte(content: bytes) -> bytes:
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


@pytest.mark.parametrize("name", [layout.FACTS, layout.BAD, layout.STATS])
def test_verify_finds_a_changed_byte(harness: IngestHarness, name: str) -> None:
    """I24: in whatever a manifest names; all else is told to be right."""
    harness.configure(KEYED)
    harness.run(snapshot({"A": 1, "B": "none"}))
    failed = harness.run(snapshot({"A": "none", "B": "none"})).manifest
    assert failed is not None
    run_id = harness.current() or ""
    assert problems(harness) == {}
    for damaged in {run_id, failed.run_id if name != layout.FACTS else run_id}:
        changed(harness, layout.run(damaged, name), one_byte)
        assert "sha256" in problems(harness)[layout.run(damaged, name)]
    (harness.root / layout.run(run_id, name)).write_bytes(b"short")
    assert "the file has 5 bytes, not" in problems(harness)[layout.run(run_id, name)]
    (harness.root / layout.run(run_id, name)).unlink()
    assert problems(harness)[layout.run(run_id, name)] == "the file is missing"


def test_verify_finds_what_became_of_a_state(harness: IngestHarness) -> None:
    """I24: facts changed or gone, a pointer gone, a marker gone, a link to nowhere; each by its name."""
    run_id = harness.publish(ONE)
    state = layout.state(SUPPLIER, run_id)
    changed(harness, f"{state}/{layout.FACTS}", one_byte)
    assert "sha256" in problems(harness)[f"{state}/{layout.FACTS}"]
    (harness.root / state / layout.FACTS).unlink()
    assert problems(harness) == {f"{state}/{layout.FACTS}": "the file is missing"}
    (mark,) = harness.names(layout.ACCEPTED)
    (harness.root / layout.ACCEPTED / mark).unlink()
    assert f"{layout.ACCEPTED}/{mark}" in problems(harness)
    (harness.root / state / layout.POINTER).unlink()
    assert set(problems(harness)) == {state, f"{layout.CURRENT}/{SUPPLIER}"}
    lose_state(harness)
    assert "is missing" in problems(harness)[f"{layout.CURRENT}/{SUPPLIER}"]


@pytest.mark.parametrize("rubbish", [b"", b"{", b"[]", b'{"other": 1}'])
def test_verify_tells_of_documents_that_are_none(harness: IngestHarness, rubbish: bytes) -> None:
    """I24: a manifest or pointer that makes no sense is a problem by its name, never an end of the check."""
    first = harness.publish(ONE)
    second = harness.publish(TWO)
    third = harness.publish(THREE)
    damaged = [
        layout.run(first, layout.MANIFEST),
        layout.state(SUPPLIER, second, layout.POINTER),
        layout.state(SUPPLIER, third, layout.MANIFEST),
    ]
    for path in damaged:
        changed(harness, path, lambda _content: rubbish)
    assert set(problems(harness)) == set(damaged)


def test_verify_tells_of_a_run_that_was_killed(harness: IngestHarness) -> None:
    """I24, I16: it has no manifest until the next run notes it."""
    run_id = run_killed(harness, ONE, PublishStep.PROCESSED)
    assert "the next run of the supplier" in problems(harness)[layout.run(run_id)]
    assert harness.run().is_pass
    assert problems(harness) == {}
