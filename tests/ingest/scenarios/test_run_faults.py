"""Faults around a run: unusable files, bad configuration, damaged state, errors in our own code."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.ingest.config import IngestRetentionSection
from penstock.ingest.contract import FailureCode, IngestRunStatus
from penstock.ingest.model import RunFailed
from penstock.ingest.run import publish
from penstock.ingest.run.hooks import RunHooks
from penstock.ingest.run.publish import PublishStep
from penstock.ingest.state.reader import list_quarantine
from penstock.ingest.state.retention import delete_expired
from penstock.ingest.state.verify import verify_suppliers
from penstock.ingest.supplier import Supplier, load_supplier
from penstock.ingest.tree import paths
from penstock.kernel.clock import ManualClock, SystemClock
from penstock.kernel.errors import Corrupt, Transient
from tests.ingest.supplier_harness import QUALITY, SUPPLIER, SupplierHarness, price_list
from tests.support.crash import Killed, call_at

ONE, TWO = price_list(("A", 1, "1,00")), price_list(("A", 2, "2,00"))


@pytest.fixture
def harness(tmp_path: Path) -> SupplierHarness:
    return SupplierHarness(tmp_path)


def failure(harness: SupplierHarness) -> FailureCode:
    manifest = harness.run().manifest
    assert manifest is not None
    assert manifest.failure is not None
    return manifest.failure.code


def test_a_file_with_none_of_the_columns_empties_nothing(harness: SupplierHarness) -> None:
    """I6, §7: whatever is required, and even where an empty snapshot is allowed."""
    harness.configure(columns={"sku": {"from": "sku"}, "qty": {"from": "qty"}}, key=[], allow_empty_snapshot=True)
    harness.drop("price.csv", ONE)
    assert harness.run().is_pass
    harness.drop("other.csv", "zzz,yyy\nA,1\n")
    assert failure(harness) is FailureCode.HEADER_MISMATCH
    harness.drop("other.json", '[{"zzz": 1}, {"zzz": 2}]')
    assert failure(harness) is FailureCode.HEADER_MISMATCH


def test_a_file_that_kills_every_run_is_set_aside(harness: SupplierHarness) -> None:
    """I16: nothing is blocked for ever; a few kills are no reason."""
    harness.drop("poison.csv", ONE)
    for _ in range(10):
        with pytest.raises(Killed):
            harness.run(RunHooks(on_step=call_at(PublishStep.PROCESSED)))
    assert failure(harness) is FailureCode.FILE_CRASHES_RUNS
    harness.drop("poison.csv", TWO)
    for _ in range(9):
        with pytest.raises(Killed):
            harness.run(RunHooks(on_step=call_at(PublishStep.PROCESSED)))
    assert harness.run().is_pass


def test_a_mistake_of_ours_is_a_failure_with_a_reason(
    harness: SupplierHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I6: the manifest says so, diag tells where, and the file is set aside rather than tried for ever."""

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("penstock.ingest.run.run.settle_repeated_keys", broken)
    harness.drop("price.csv", ONE)
    manifest = harness.run().manifest
    assert manifest is not None
    assert manifest.failure is not None
    assert manifest.failure.code is FailureCode.INTERNAL
    told = (harness.root / paths.run(manifest.run_id, paths.ERROR)).read_text()
    assert "ZeroDivisionError: boom" in told
    assert harness.files(paths.broken(SUPPLIER)) == ["price.csv"]


def test_a_mistake_behind_the_switch_is_no_failure(harness: SupplierHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """I10, I16: what is current has passed, and the next run finishes it; its file is not called broken."""

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("boom")

    harness.drop("price.csv", ONE)
    with monkeypatch.context() as patched:
        patched.setattr("penstock.ingest.run.publish.mark_accepted", broken)
        with pytest.raises(ZeroDivisionError):
            harness.run()
    harness.run()
    (run_id,) = harness.tree.list_runs(SUPPLIER)
    assert harness.json(paths.run(run_id, paths.MANIFEST))["status"] == "PASS"
    assert harness.files(paths.archive(SUPPLIER)) == ["price.csv"]


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"key": ["sku", "sku"]}, "key"),
        ({"source": {"quote": "é"}}, "source.quote"),
        ({"source": {"quote": ";"}}, "source.quote"),
        ({"columns": {"sku": {"from": []}}}, "columns.sku.from"),
        ({"max_state_age_hours": 1e12}, "max_state_age_hours"),
        ({"columns": {"sku": {"from": "sku", "min": 1}}, "key": ["sku"]}, "columns.sku.min"),
        ({"columns": {"sku": {"from": "sku", "type": "date", "default": "soon"}}}, "columns.sku.default"),
        (
            {"duplicate_keys": "keep", "targets": [{"dictionary": {"tenant": "t", "code": "C"}}]},
            "duplicate_keys",
        ),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(
    harness: SupplierHarness, settings: dict[str, Any], where: str
) -> None:
    """I18: before a file meets it, and with the place."""
    harness.configure(**settings)
    with pytest.raises(RunFailed, match=where) as failed:
        load_supplier(harness.root / paths.config(SUPPLIER))
    assert failed.value.code is FailureCode.CONFIG_INVALID


def test_what_means_nothing_may_be_said_twice() -> None:
    """I18: texts that mean an empty cell are a set."""
    columns = {"sku": {"from": "sku", "empty": ["", "-", "-"]}}
    assert Supplier.model_validate({**QUALITY, "columns": columns}).columns["sku"].empty == ["-"]


def test_two_targets_are_two() -> None:
    """I23: the same dictionary on two servers, and webhooks that differ in their query, which is not shown."""
    both = [{"dictionary": {"tenant": "t", "code": "C", "url": f"http://localhost:{port}"}} for port in (1, 2)]
    hooks = [{"webhook": {"url": f"http://localhost/hook?id={number}"}} for number in (1, 2)]
    supplier = Supplier.model_validate({**QUALITY, "key": ["sku"], "targets": [*both, *hooks]})
    assert len({target.digest for target in supplier.targets}) == 4
    assert all("id=" not in target.name for target in supplier.targets)


def test_the_fence_grows_though_the_state_was_lost(harness: SupplierHarness) -> None:
    """I11: what was published before counts, also when the symlink had to be removed."""
    for content in (ONE, TWO):
        harness.drop("price.csv", content)
        harness.run()
    (harness.root / paths.CURRENT / SUPPLIER).unlink()
    harness.drop("price.csv", price_list(("A", 3, "3,00")))
    manifest = harness.run().manifest
    assert manifest is not None
    assert manifest.fence == 3


def test_a_category_that_lost_all_its_facts_has_vanished(harness: SupplierHarness) -> None:
    """I20: a sheet that is there and holds nothing is no category."""
    import io
    import zipfile

    def archive(**files: str) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as packed:
            for name, content in files.items():
                packed.writestr(f"{name}.csv", content)
        return out.getvalue()

    harness.configure(guards={"vanished_categories": "fail"}, key=["category_key", "sku"])
    harness.drop("a.zip", archive(x=ONE, y=TWO))
    assert harness.run().is_pass
    harness.drop("b.zip", archive(x=TWO, y=price_list()))
    assert failure(harness) is FailureCode.GUARD_CATEGORIES_VANISHED


@pytest.mark.parametrize("content", [ONE, "a;b\n1;2\n"])
def test_where_a_file_went_is_known_though_its_run_was_killed(harness: SupplierHarness, content: str) -> None:
    """I16: killed after the move, before that was noted: the next run notes it."""
    harness.drop("price.csv", content)
    with pytest.raises(Killed):
        harness.run(RunHooks(on_step=call_at(PublishStep.MOVED)))
    harness.run()
    (run_id,) = harness.tree.list_runs(SUPPLIER)
    moved_to = harness.json(paths.run(run_id, paths.MANIFEST))["moved_to"]
    assert (harness.root / moved_to).read_text() == content
    assert all(one["reason"] for one in list_quarantine(harness.tree, SUPPLIER))


def test_a_file_that_cannot_be_moved_does_not_undo_its_publication(
    harness: SupplierHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I16: the state is switched, so the run has passed; the file is known by its content."""

    def refused(*_: Any, **__: Any) -> None:
        raise Transient("STORAGE_DOWN", "no")

    harness.drop("price.csv", ONE)
    with monkeypatch.context() as patched:
        patched.setattr(harness.tree, "move", refused)
        manifest = harness.run().manifest
    assert manifest is not None
    assert manifest.status is IngestRunStatus.PASS
    assert harness.run().reason == "all files were accepted before"


def test_one_file_that_cannot_be_read_does_not_stop_gc(
    harness: SupplierHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I12: what we may not read, nobody reads by our ways, and it goes."""
    harness.drop("price.csv", "a;b\n1;2\n")
    harness.run()
    opened = os.open

    def refusing(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith("price.csv"):
            raise PermissionError
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    clock = ManualClock(SystemClock().now() + timedelta(days=31))
    swept = delete_expired(harness.tree, IngestRetentionSection(), clock, "test")
    assert any(one.path.endswith("price.csv") and one.is_deleted for one in swept.expired)


def test_verify_looks_at_the_file_itself(harness: SupplierHarness) -> None:
    """I24: its hash is in the manifest too."""
    harness.drop("price.csv", ONE)
    harness.run()
    (harness.root / paths.archive(SUPPLIER) / "price.csv").write_text(TWO)
    assert [one.path for one in verify_suppliers(harness.tree, [SUPPLIER]) if one.problem] == [
        f"{paths.archive(SUPPLIER)}/price.csv"
    ]


def test_a_damaged_state_is_told_as_one(harness: SupplierHarness) -> None:
    """I14: not as a mistake of ours."""
    harness.drop("price.csv", ONE)
    manifest = harness.run().manifest
    assert manifest is not None
    stats = harness.root / paths.state(SUPPLIER, manifest.run_id, paths.STATS)
    stats.chmod(0o644)
    stats.write_text('{"good_rows": 9}')
    with pytest.raises(Corrupt):
        publish.read_current_state(harness.tree, SUPPLIER)


def test_a_ledger_that_makes_no_sense_is_none(harness: SupplierHarness) -> None:
    """I16: what is only remembered may be lost."""
    harness.tree.write(
        paths.ledger(SUPPLIER), b'{"seen": {"a": {"signature": 1, "since": "q"}}, "failed_runs": "many"}'
    )
    harness.drop("price.csv", ONE)
    assert harness.run().is_pass
