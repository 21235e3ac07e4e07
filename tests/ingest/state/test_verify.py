"""The verification of hashes, and the report of damaged files."""

from collections.abc import Callable

import pytest

from penstock.ingest.run.publish import PublishStep
from penstock.ingest.state.verify import verify_suppliers
from penstock.ingest.tree import paths as layout
from tests.ingest.harness import KEYED, SUPPLIER, IngestHarness, snapshot
from tests.ingest.state.damage import ONE, THREE, TWO, lose_state, run_killed


def list_problems(harness: IngestHarness) -> dict[str, str]:
    return {
        check.path: check.problem
        for check in verify_suppliers(harness.tree, harness.tree.list_suppliers())
        if check.problem
    }


def change_file(harness: IngestHarness, path: str, change: Callable[[bytes], bytes]) -> None:
    file = harness.root / path
    content = file.read_bytes()
    file.parent.chmod(0o755)
    file.unlink()  # facts have two names: each is damaged alone
    file.write_bytes(change(content))


def flip_byte(content: bytes) -> bytes:
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


@pytest.mark.parametrize("name", [layout.FACTS, layout.BAD, layout.STATS])
def test_verify_finds_a_changed_byte(harness: IngestHarness, name: str) -> None:
    """I24: a changed byte in any file of a manifest is a problem; all other files are intact."""
    harness.configure(KEYED)
    harness.run(snapshot({"A": 1, "B": "none"}))
    failed = harness.run(snapshot({"A": "none", "B": "none"})).manifest
    assert failed is not None
    run_id = harness.current() or ""
    assert list_problems(harness) == {}
    for damaged in {run_id, failed.run_id if name != layout.FACTS else run_id}:
        change_file(harness, layout.make_run_path(damaged, name), flip_byte)
        assert "sha256" in list_problems(harness)[layout.make_run_path(damaged, name)]
    (harness.root / layout.make_run_path(run_id, name)).write_bytes(b"short")
    assert "the file has 5 bytes, not" in list_problems(harness)[layout.make_run_path(run_id, name)]
    (harness.root / layout.make_run_path(run_id, name)).unlink()
    assert list_problems(harness)[layout.make_run_path(run_id, name)] == "the file is missing"


def test_verify_finds_a_damaged_state(harness: IngestHarness) -> None:
    """I24: damaged facts, a missing pointer, a missing marker and a broken link are problems by their path."""
    run_id = harness.publish(ONE)
    state = layout.make_state_path(SUPPLIER, run_id)
    change_file(harness, f"{state}/{layout.FACTS}", flip_byte)
    assert "sha256" in list_problems(harness)[f"{state}/{layout.FACTS}"]
    (harness.root / state / layout.FACTS).unlink()
    assert list_problems(harness) == {f"{state}/{layout.FACTS}": "the file is missing"}
    (marker,) = harness.names(layout.ACCEPTED)
    (harness.root / layout.ACCEPTED / marker).unlink()
    assert f"{layout.ACCEPTED}/{marker}" in list_problems(harness)
    (harness.root / state / layout.POINTER).unlink()
    assert set(list_problems(harness)) == {state, f"{layout.CURRENT}/{SUPPLIER}"}
    lose_state(harness)
    assert "is missing" in list_problems(harness)[f"{layout.CURRENT}/{SUPPLIER}"]


@pytest.mark.parametrize("rubbish", [b"", b"{", b"[]", b'{"other": 1}'])
def test_verify_finds_invalid_documents(harness: IngestHarness, rubbish: bytes) -> None:
    """I24: an invalid manifest or pointer is a problem by its path, and does not end the verification."""
    first = harness.publish(ONE)
    second = harness.publish(TWO)
    third = harness.publish(THREE)
    damaged = [
        layout.make_run_path(first, layout.MANIFEST),
        layout.make_state_path(SUPPLIER, second, layout.POINTER),
        layout.make_state_path(SUPPLIER, third, layout.MANIFEST),
    ]
    for path in damaged:
        change_file(harness, path, lambda _content: rubbish)
    assert set(list_problems(harness)) == set(damaged)


def test_verify_finds_a_killed_run(harness: IngestHarness) -> None:
    """I24, I16: a killed run has no manifest until the next run."""
    run_id = run_killed(harness, ONE, PublishStep.PROCESSED)
    assert "the next run of the supplier" in list_problems(harness)[layout.make_run_path(run_id)]
    assert harness.run().is_pass
    assert list_problems(harness) == {}
