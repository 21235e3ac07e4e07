"""The log of files that were published, rejected or moved, and of deliveries.

A run logs nothing itself. The process that caused the run logs its outcome, so every event is logged exactly once: the
watcher for the processes that it starts, and a worker of flows for the runs in its own process.
"""

from collections.abc import Mapping
from typing import Any

import structlog

from penstock.ingest.contract import FailureCode, IngestRunStatus
from penstock.ingest.model import DeliveryStatus
from penstock.ingest.run.run import RETRIED
from penstock.ingest.tree import paths

_log = structlog.get_logger()


def log_outcome(outcome: Mapping[str, Any]) -> None:
    """Log the events of a call; *outcome* is the document of a `RunOutcome`."""
    supplier = outcome["supplier"]
    if (recovered := outcome["recovered"]) is not None:
        _log_end(recovered)
    _log_sorted(supplier, outcome["moved"])
    if (manifest := outcome["manifest"]) is not None:
        _log_end(manifest)
    else:
        _log.debug("ingest_run_skipped", supplier=supplier, reason=outcome["reason"])
    if outcome["moveError"] is not None:
        file = manifest and manifest["input_filename"]
        _log.warning("file_move_failed", supplier=supplier, file=file, error=outcome["moveError"])
    log_deliveries(supplier, outcome["deliveries"])


def log_deliveries(supplier: str, deliveries: Mapping[str, Mapping[str, Any]]) -> None:
    """Log the results of deliveries by target; each is the document of a `DeliveryResult`."""
    for target, result in deliveries.items():
        log = _log.bind(supplier=supplier, target=target, run_id=result["runId"])
        if result["status"] == DeliveryStatus.DELIVERED:
            log.info("delivery_completed")
            continue
        event = "delivery_refused" if result["status"] == DeliveryStatus.REFUSED else "delivery_failed"
        log.warning(event, code=result["code"], error=result["error"], retry_at=result["retryAt"])


def _log_sorted(supplier: str, moved: Mapping[str, str]) -> None:
    """Log the files that were moved out of the inbox without being processed."""
    for name, path in moved.items():
        if path.startswith(f"{paths.make_duplicates_path(supplier)}/"):
            _log.info("file_duplicate", supplier=supplier, file=name, moved_to=path)
        elif path.startswith(f"{paths.make_obsolete_path(supplier)}/"):
            _log.info("file_skipped", supplier=supplier, file=name, moved_to=path, reason="a newer file is there")


def _log_end(manifest: Mapping[str, Any]) -> None:
    log = _log.bind(supplier=manifest["supplier"], file=manifest["input_filename"], run_id=manifest["run_id"])
    if manifest["status"] == IngestRunStatus.PASS:
        rows = {"good_rows": manifest["good_rows"], "bad_rows": manifest["bad_rows"]}
        log.info("file_published", fence=manifest["fence"], **rows)
        return
    code = manifest["failure_code"]
    # A file that is not at fault stays in the inbox.
    event = "ingest_run_failed" if FailureCode(code) in RETRIED else "file_rejected"
    log.warning(event, code=code, reason=manifest["failure"], moved_to=manifest["moved_to"])
