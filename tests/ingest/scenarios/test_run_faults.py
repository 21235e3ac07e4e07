"""Faults of a run: unusable files, invalid configurations, damaged states, and bugs."""

import io
import os
import zipfile
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


def run_and_read_failure(harness: SupplierHarness) -> FailureCode:
    manifest = harness.run().manifest
    assert manifest is not None
    assert manifest.failure is not None
    return manifest.failure.code


def test_file_without_any_column_is_rejected(harness: SupplierHarness) -> None:
    """I6, §7: a file without any of the columns is rejected, even if an empty snapshot is allowed."""
    harness.configure(columns={"sku": {"from": "sku"}, "qty": {"from": "qty"}}, key=[], allow_empty_snapshot=True)
    harness.drop("price.csv", ONE)
    assert harness.run().is_pass
    harness.drop("other.csv", "zzz,yyy\nA,1\n")
    assert run_and_read_failure(harness) is FailureCode.HEADER_MISMATCH
    harness.drop("other.json", '[{"zzz": 1}, {"zzz": 2}]')
    assert run_and_read_failure(harness) is FailureCode.HEADER_MISMATCH


def test_file_that_kills_every_run_is_quarantined(harness: SupplierHarness) -> None:
    """I16: a file during which ten runs in a row were killed is quarantined; fewer kills are not a reason."""
    harness.drop("poison.csv", ONE)
    for _ in range(10):
        with pytest.raises(Killed):
            harness.run(RunHooks(on_step=call_at(PublishStep.PROCESSED)))
    assert run_and_read_failure(harness) is FailureCode.FILE_CRASHES_RUNS
    harness.drop("poison.csv", TWO)
    for _ in range(9):
        with pytest.raises(Killed):
            harness.run(RunHooks(on_step=call_at(PublishStep.PROCESSED)))
    assert harness.run().is_pass


def test_bug_is_a_failure_with_a_traceback(harness: SupplierHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """I6: a bug fails the run with INTERNAL, its traceback is in diag, and the file is quarantined."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("penstock.ingest.run.run.settle_repeated_keys", fail)
    harness.drop("price.csv", ONE)
    manifest = harness.run().manifest
    assert manifest is not None
    assert manifest.failure is not None
    assert manifest.failure.code is FailureCode.INTERNAL
    trace = (harness.root / paths.make_run_path(manifest.run_id, paths.ERROR)).read_text()
    assert "ZeroDivisionError: boom" in trace
    assert harness.files(paths.make_broken_path(SUPPLIER)) == ["price.csv"]


def test_bug_after_the_switch_does_not_fail_the_run(harness: SupplierHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """I10, I16: a published run has passed; the next run completes it, and its file is archived."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("boom")

    harness.drop("price.csv", ONE)
    with monkeypatch.context() as patched:
        patched.setattr("penstock.ingest.run.publish.mark_accepted", fail)
        with pytest.raises(ZeroDivisionError):
            harness.run()
    harness.run()
    (run_id,) = harness.tree.list_runs(SUPPLIER)
    assert harness.json(paths.make_run_path(run_id, paths.MANIFEST))["status"] == "PASS"
    assert harness.files(paths.make_archive_path(SUPPLIER)) == ["price.csv"]


@pytest.mark.parametrize(
    ("settings", "key"),
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
def test_invalid_configuration_is_refused(harness: SupplierHarness, settings: dict[str, Any], key: str) -> None:
    """I18: an invalid configuration is refused with the key, before a file is read."""
    harness.configure(**settings)
    with pytest.raises(RunFailed, match=key) as failed:
        load_supplier(harness.root / paths.make_config_path(SUPPLIER))
    assert failed.value.code is FailureCode.CONFIG_INVALID


def test_repeated_empty_texts_are_allowed() -> None:
    """I18: the texts that mean an empty cell are a set."""
    columns = {"sku": {"from": "sku", "empty": ["", "-", "-"]}}
    assert Supplier.model_validate({**QUALITY, "columns": columns}).columns["sku"].empty == ["-"]


def test_targets_are_distinguished() -> None:
    """I23: a dictionary on two servers is two targets; webhooks that differ in the hidden query are too."""
    both = [{"dictionary": {"tenant": "t", "code": "C", "url": f"http://localhost:{port}"}} for port in (1, 2)]
    hooks = [{"webhook": {"url": f"http://localhost/hook?id={number}"}} for number in (1, 2)]
    supplier = Supplier.model_validate({**QUALITY, "key": ["sku"], "targets": [*both, *hooks]})
    assert len({target.digest for target in supplier.targets}) == 4
    assert all("id=" not in target.name for target in supplier.targets)


def test_fence_grows_after_the_state_is_lost(harness: SupplierHarness) -> None:
    """I11: earlier publications count, even if the symlink had to be removed."""
    for content in (ONE, TWO):
        harness.drop("price.csv", content)
        harness.run()
    (harness.root / paths.CURRENT / SUPPLIER).unlink()
    harness.drop("price.csv", price_list(("A", 3, "3,00")))
    manifest = harness.run().manifest
    assert manifest is not None
    assert manifest.fence == 3


def test_category_without_facts_has_vanished(harness: SupplierHarness) -> None:
    """I20: a sheet without facts is a missing category."""

    def make_archive(**files: str) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as packed:
            for name, content in files.items():
                packed.writestr(f"{name}.csv", content)
        return out.getvalue()

    harness.configure(guards={"vanished_categories": "fail"}, key=["category_key", "sku"])
    harness.drop("a.zip", make_archive(x=ONE, y=TWO))
    assert harness.run().is_pass
    harness.drop("b.zip", make_archive(x=TWO, y=price_list()))
    assert run_and_read_failure(harness) is FailureCode.GUARD_CATEGORIES_VANISHED


@pytest.mark.parametrize("content", [ONE, "a;b\n1;2\n"])
def test_move_of_a_killed_run_is_recorded(harness: SupplierHarness, content: str) -> None:
    """I16: the next run records the move of a run that was killed before it could."""
    harness.drop("price.csv", content)
    with pytest.raises(Killed):
        harness.run(RunHooks(on_step=call_at(PublishStep.MOVED)))
    harness.run()
    (run_id,) = harness.tree.list_runs(SUPPLIER)
    moved_to = harness.json(paths.make_run_path(run_id, paths.MANIFEST))["moved_to"]
    assert (harness.root / moved_to).read_text() == content
    assert all(file["reason"] for file in list_quarantine(harness.tree, SUPPLIER))


def test_file_that_cannot_be_moved_is_published(harness: SupplierHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """I16: the state is published, so the run has passed; the next run finds a duplicate."""

    def refuse(*_: Any, **__: Any) -> None:
        raise Transient("STORAGE_DOWN", "no")

    harness.drop("price.csv", ONE)
    with monkeypatch.context() as patched:
        patched.setattr(harness.tree, "move", refuse)
        manifest = harness.run().manifest
    assert manifest is not None
    assert manifest.status is IngestRunStatus.PASS
    assert harness.run().reason == "all files were accepted before"


def test_unreadable_file_expires(harness: SupplierHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """I12: gc deletes expired files that it cannot read."""
    harness.drop("price.csv", "a;b\n1;2\n")
    harness.run()
    open_file = os.open

    def refuse_open(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith("price.csv"):
            raise PermissionError
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse_open)
    clock = ManualClock(SystemClock().now() + timedelta(days=31))
    result = delete_expired(harness.tree, IngestRetentionSection(), clock, "test")
    assert any(entry.path.endswith("price.csv") and entry.is_deleted for entry in result.expired)


def test_verify_checks_the_archived_file(harness: SupplierHarness) -> None:
    """I24: the hash of the archived file is in the manifest too."""
    harness.drop("price.csv", ONE)
    harness.run()
    (harness.root / paths.make_archive_path(SUPPLIER) / "price.csv").write_text(TWO)
    assert [check.path for check in verify_suppliers(harness.tree, [SUPPLIER]) if check.problem] == [
        f"{paths.make_archive_path(SUPPLIER)}/price.csv"
    ]


def test_damaged_state_is_an_error_of_its_own(harness: SupplierHarness) -> None:
    """I14: a damaged state is an error with a code, not a bug."""
    harness.drop("price.csv", ONE)
    manifest = harness.run().manifest
    assert manifest is not None
    stats = harness.root / paths.make_state_path(SUPPLIER, manifest.run_id, paths.STATS)
    stats.chmod(0o644)
    stats.write_text('{"good_rows": 9}')
    with pytest.raises(Corrupt):
        publish.read_current_state(harness.tree, SUPPLIER)


def test_invalid_ledger_is_ignored(harness: SupplierHarness) -> None:
    """I16: the ledger may be lost."""
    harness.tree.write(
        paths.make_ledger_path(SUPPLIER), b'{"seen": {"a": {"signature": 1, "since": "q"}}, "failed_runs": "many"}'
    )
    harness.drop("price.csv", ONE)
    assert harness.run().is_pass
