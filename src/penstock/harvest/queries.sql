-- name: insert_feed
-- Insert the row of a feed unless it exists.
INSERT INTO harvest_feed (feed) VALUES ($1) ON CONFLICT DO NOTHING;

-- name: lock_feed
-- Lock a feed for a decision about the feed as a whole.
SELECT watermark, watermark_run, watermark_at FROM harvest_feed WHERE feed = $1 FOR UPDATE;

-- name: find_active_run
-- The run of a feed that is being planned or that is active.
SELECT run_id FROM harvest_plan WHERE feed = $1 AND state = {plan.PLANNING}
UNION ALL
SELECT run_id FROM run_metadata WHERE feed = $1 AND state IN {run.active}
LIMIT 1;

-- name: find_latest_run
-- The last started run of a feed.
SELECT run_id FROM run_metadata WHERE feed = $1 ORDER BY started_at DESC, run_id DESC LIMIT 1;

-- name: read_last_request
-- The time of the last request for a run of the feed.
SELECT max(requested_at) FROM harvest_plan WHERE feed = $1;

-- name: read_last_full
-- The start time of the last completed full run.
SELECT max(started_at) FROM run_metadata WHERE feed = $1 AND run_type = 'full' AND state = {run.COMPLETED};

-- name: close_breaker
-- Close the breaker for an operator who wants a run now. A pause that the source requested stays.
UPDATE harvest_feed SET breaks = 0, failures = 0, probed_at = NULL, paused_until = NULL WHERE feed = $1 AND breaks > 0;

-- name: insert_plan
-- Insert a request for a run.
INSERT INTO harvest_plan (run_id, feed, run_type, state, requested_by, requested_at, touched_at, trace_id, moves)
VALUES ($1, $2, $3, {plan.PLANNING}, $4, $5, $5, $6, $7);

-- name: read_plan
-- A requested run, with the present watermark of its feed.
SELECT p.*, f.watermark FROM harvest_plan p JOIN harvest_feed f USING (feed) WHERE p.run_id = $1;

-- name: update_plan_progress
-- Record the number of count requests.
UPDATE harvest_plan SET counts = $2, touched_at = $3 WHERE run_id = $1 AND state = {plan.PLANNING};

-- name: settle_plan
-- End a plan as planned or failed; no row means that it has ended already.
UPDATE harvest_plan
SET state = $2, counts = $3, error = $4, touched_at = $5
WHERE run_id = $1 AND state = {plan.PLANNING}
RETURNING feed;

-- name: append_plan_moves
-- Append the journal entries of a plan.
UPDATE harvest_plan SET moves = moves || $2::bigint[] WHERE run_id = $1;

-- name: insert_run
-- Insert a planned run.
INSERT INTO run_metadata (
    run_id, feed, run_type, expected_workers, watermark_before, started_at, state, upper_bound, trace_id, requested_by,
    heatmap, touched_at, moves)
VALUES ($1, $2, $3, $4, $5, $6, {run.CREATED}, $7, $8, $9, $10, $6, $11);

-- name: insert_partitions
-- Insert the partitions of a run, with the counts of the source.
INSERT INTO partition_progress (
    run_id, partition_id, kind, lower_bound, upper_bound, counted, scan_started_at, created_at, updated_at)
SELECT $1, partition_id, kind, lower_bound, upper_bound, counted, $7, $7, $7
FROM unnest($2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::integer[])
    AS input (partition_id, kind, lower_bound, upper_bound, counted);

-- name: read_run
-- One run.
SELECT * FROM run_metadata WHERE run_id = $1;

-- name: lock_run
-- One run, locked until the end of the transaction.
SELECT * FROM run_metadata WHERE run_id = $1 FOR UPDATE;

-- name: read_task
-- H4: the partition of a work item.
SELECT p.*, r.feed, r.run_type, r.state, r.watermark_before, r.upper_bound AS run_upper_bound, r.trace_id, w.status
FROM partition_progress p
JOIN run_metadata r USING (run_id)
LEFT JOIN worker_runs w USING (run_id, partition_id)
WHERE p.run_id = $1 AND p.partition_id = $2;

-- name: lock_partition
-- Lock a partition until the end of the transaction.
SELECT partition_id FROM partition_progress WHERE run_id = $1 AND partition_id = $2 FOR UPDATE;

-- name: advance_partition
-- H4: the compare-and-set of the founding document, with the counts of the pass.
UPDATE partition_progress
SET next_offset = $4,
    next_cursor = $5,
    scan = $6,
    received = $12,
    seen = $7,
    missed = $8,
    was_clean = $13,
    counted = $9,
    last_scan_at = CASE WHEN scan = $6 THEN last_scan_at ELSE scan_started_at END,
    scan_started_at = CASE WHEN scan = $6 THEN scan_started_at ELSE $11::timestamptz END,
    completed = $10,
    rescues = 0,
    paused_until = NULL,
    updated_at = $11::timestamptz
WHERE run_id = $1
  AND partition_id = $2
  AND next_offset = $3
  AND NOT completed;

-- name: upsert_work
-- Record the worker, the progress and the status of a partition.
INSERT INTO worker_runs (
    id, run_id, partition_id, worker_id, status, records_processed, error_message, work_item_payload, started_at,
    completed_at)
VALUES (
    $1, $2, $3, $4, $5::text, $6, $7, $8, $10::timestamptz,
    CASE WHEN $5::text = {partition.RUNNING} THEN NULL ELSE $9::timestamptz END)
ON CONFLICT (run_id, partition_id) DO UPDATE
SET worker_id = excluded.worker_id,
    status = excluded.status,
    records_processed = excluded.records_processed,
    error_message = excluded.error_message,
    work_item_payload = coalesce(excluded.work_item_payload, worker_runs.work_item_payload),
    completed_at = excluded.completed_at
WHERE worker_runs.status = {partition.RUNNING};

-- name: count_ended
-- H5: add to both counters of the founding document.
UPDATE run_metadata
SET completed_workers = completed_workers + $2, failed_workers = failed_workers + $3, touched_at = $4
WHERE run_id = $1 AND state IN {run.fetching}
RETURNING completed_workers, expected_workers, failed_workers;

-- name: move_run
-- Move a run from state $3 to $2; no row means that it is in another state.
UPDATE run_metadata
SET state = $2, error = $4, touched_at = $5, rescues = 0
WHERE run_id = $1 AND state = $3
RETURNING run_id;

-- name: force_run
-- H5: record the actor and the reason of a forced consolidation.
UPDATE run_metadata SET forced_by = $2, force_reason = $3 WHERE run_id = $1;

-- name: unforce_run
-- Forget a force: a retried run is checked like any other.
UPDATE run_metadata SET forced_by = NULL, force_reason = NULL WHERE run_id = $1;

-- name: list_failed_partitions
-- The failed partitions of a run, or only $2, with their progress.
SELECT p.partition_id, p.next_offset, p.scan
FROM partition_progress p
JOIN worker_runs w USING (run_id, partition_id)
WHERE p.run_id = $1 AND w.status IN {partition.retry} AND ($2::text IS NULL OR p.partition_id = $2)
ORDER BY p.partition_id;

-- name: revive_partitions
-- H11: failed partitions continue where they stopped. A pass that failed for moving rows starts again.
WITH revived AS (
    UPDATE worker_runs SET status = {partition.RUNNING}, error_message = NULL, completed_at = NULL
    WHERE run_id = $1 AND partition_id = ANY ($2::text[]) AND status IN {partition.retry}
    RETURNING partition_id
), counted AS (
    UPDATE run_metadata
    SET failed_workers = failed_workers - (SELECT count(*) FROM revived), touched_at = $3
    WHERE run_id = $1
)
UPDATE partition_progress p SET updated_at = $3, rescues = 0
FROM revived WHERE p.run_id = $1 AND p.partition_id = revived.partition_id;

-- name: lock_partitions
-- Lock all partitions of a run until the end of the transaction, in order.
SELECT partition_id FROM partition_progress WHERE run_id = $1 ORDER BY partition_id FOR UPDATE;

-- name: list_unfinished_partitions
-- The partitions of a run that have not ended.
SELECT p.partition_id, p.seen
FROM partition_progress p
LEFT JOIN worker_runs w USING (run_id, partition_id)
WHERE p.run_id = $1 AND NOT p.completed AND (w.status IS NULL OR w.status = {partition.RUNNING})
ORDER BY p.partition_id;

-- name: touch_consolidating
-- Record progress, and lock the run: concurrent late writers wait here. No row: the run is not consolidating any more.
UPDATE run_metadata SET touched_at = $2 WHERE run_id = $1 AND state = {run.CONSOLIDATING} RETURNING run_id;

-- name: set_pricing_version
-- H7: record the pricing rules of the run.
UPDATE run_metadata SET pricing_version = $2 WHERE run_id = $1;

-- name: count_consolidated
-- Add the records of one transaction, in that transaction.
UPDATE run_metadata SET consolidated = consolidated + $2, rejected = rejected + $3, touched_at = $4 WHERE run_id = $1;

-- name: append_moves
-- Append journal entries of a run and its partitions.
UPDATE run_metadata SET moves = moves || $2::bigint[] WHERE run_id = $1;

-- name: count_rejects
-- The distinct rejected records of a run, and the records that its last passes saw.
SELECT
    (SELECT count(DISTINCT coalesce(key, left(payload, 1000))) FROM harvest_reject WHERE run_id = $1) AS rejected,
    (SELECT coalesce(sum(seen), 0) FROM partition_progress WHERE run_id = $1) AS seen;

-- name: is_pending
-- Whether a raw record of the feed waits for consolidation.
SELECT EXISTS (SELECT FROM raw_pending WHERE feed = $1);

-- name: complete_run
-- H8: complete the run, in the transaction that saves its watermark.
UPDATE run_metadata
SET state = {run.COMPLETED}, completed_at = $2, watermark_after = $3, deleted = $4, touched_at = $2, error = NULL
WHERE run_id = $1 AND state IN {run.complete}
RETURNING
    (SELECT coalesce(sum(seen), 0) FROM partition_progress WHERE run_id = $1) AS records,
    extract(epoch FROM $2 - started_at) AS seconds;

-- name: list_watermarks
-- The watermarks of some feeds.
SELECT feed, watermark FROM harvest_feed WHERE feed = ANY ($1::text[]) AND watermark IS NOT NULL;

-- name: save_watermark
-- H9: move the watermark forward, never back.
UPDATE harvest_feed
SET watermark = greatest(watermark, $2), watermark_run = $3, watermark_at = $4
WHERE feed = $1
RETURNING watermark;

-- name: insert_watermark
-- H13: append to the history of the watermark.
INSERT INTO harvest_watermark (feed, run_id, last_updated_at, run_completed_at) VALUES ($1, $2, $3, $4);

-- name: has_rejects_without_key
-- Whether the run rejected records without a key.
SELECT EXISTS (SELECT FROM harvest_reject WHERE run_id = $1 AND key IS NULL);

-- name: list_runs_since_full
-- The run, and all runs since the last completed full run before it; no row if there is no such run.
SELECT r.run_id FROM run_metadata r
WHERE r.feed = $1 AND r.started_at >= (
    SELECT max(started_at) FROM run_metadata
    WHERE feed = $1 AND run_id <> $2 AND run_type = 'full' AND state = {run.COMPLETED} AND failed_workers = 0);

-- name: allow_long_statements
-- Remove the time limit of statements, for a transaction that reads a whole feed.
SELECT set_config('statement_timeout', '0', true);

-- name: count_live
-- H10: the live records of a feed, and the number of them that none of the runs saw.
SELECT count(*) AS live, count(*) FILTER (WHERE seen_run <> ALL ($2::uuid[])) AS unseen
FROM raw_record WHERE feed = $1 AND NOT is_deleted;

-- name: soft_delete
-- H10: delete the records that none of the runs saw.
WITH deleted AS (
    UPDATE raw_record SET is_deleted = true WHERE feed = $1 AND seen_run <> ALL ($2::uuid[]) AND NOT is_deleted RETURNING key
), marked AS (
    UPDATE canonical_record c SET deleted_at = $3, run_id = $4, changed_at = $3
    FROM deleted WHERE c.feed = $1 AND c.key = deleted.key AND c.deleted_at IS NULL
    RETURNING 1
)
SELECT count(*) FROM marked;

-- name: publish_records
-- Copy the live canonical records to the table that dictionaries read; return the number of differences.
WITH removed AS (
    DELETE FROM published_record p
    WHERE p.feed = $1 AND NOT EXISTS (
        SELECT FROM canonical_record c WHERE c.feed = $1 AND c.key = p.key AND c.deleted_at IS NULL
    )
    RETURNING 1
), written AS (
    INSERT INTO published_record (feed, key, fields, cost, price, rule, run_id, version, changed_at)
    SELECT c.feed, c.key, c.fields, c.cost, c.price, c.rule, c.run_id, c.version, c.changed_at
    FROM canonical_record c
    LEFT JOIN published_record p ON p.feed = $1 AND p.key = c.key
    WHERE c.feed = $1 AND c.deleted_at IS NULL
      AND (p.run_id, p.version, p.changed_at) IS DISTINCT FROM (c.run_id, c.version, c.changed_at)
    ON CONFLICT (feed, key) DO UPDATE
    SET fields = excluded.fields, cost = excluded.cost, price = excluded.price, rule = excluded.rule,
        run_id = excluded.run_id, version = excluded.version, changed_at = excluded.changed_at
    RETURNING 1
)
SELECT (SELECT count(*) FROM removed) + (SELECT count(*) FROM written);

-- name: list_stalled_plans
-- Plans without progress since $1.
SELECT run_id, feed, trace_id, rescues FROM harvest_plan WHERE state = {plan.PLANNING} AND touched_at < $1;

-- name: rescue_plan
-- Count a rescue; of many processes that see the same stall one gets a row.
UPDATE harvest_plan SET rescues = rescues + 1, touched_at = $2
WHERE run_id = $1 AND rescues = $3 AND state = {plan.PLANNING} RETURNING run_id;

-- name: list_stalled_partitions
-- Partitions of active runs without progress since $1.
SELECT p.run_id, p.partition_id, p.next_offset, p.scan, p.rescues, r.trace_id
FROM run_metadata r
JOIN partition_progress p USING (run_id)
LEFT JOIN worker_runs w USING (run_id, partition_id)
WHERE r.state IN {run.fetching} AND NOT p.completed AND p.updated_at < $1 AND p.paused_until IS NULL
  AND (w.status IS NULL OR w.status = {partition.RUNNING})
ORDER BY p.run_id, p.partition_id
LIMIT 100;

-- name: pause_partition
-- H15: pause a partition without a message: a waiting message would delay those of other feeds.
UPDATE partition_progress SET paused_until = $4
WHERE run_id = $1 AND partition_id = $2 AND next_offset = $3 AND NOT completed;

-- name: resume_partitions
-- End the pauses that are over, up to 100 at a time.
UPDATE partition_progress p SET paused_until = NULL
FROM (
    SELECT run_id, partition_id FROM partition_progress WHERE paused_until <= $1
    ORDER BY paused_until LIMIT 100 FOR UPDATE SKIP LOCKED
) AS due, run_metadata r
WHERE p.run_id = due.run_id AND p.partition_id = due.partition_id AND r.run_id = p.run_id
RETURNING p.run_id, p.partition_id, p.next_offset, p.scan, r.trace_id;

-- name: list_runs_without_progress
-- Runs without a page since $1 that have no alert about it yet.
SELECT r.run_id, r.feed FROM run_metadata r
WHERE r.state IN {run.fetching}
  AND (SELECT max(updated_at) FROM partition_progress p WHERE p.run_id = r.run_id) < $1
  AND NOT EXISTS (SELECT FROM harvest_alert a WHERE a.run_id = r.run_id AND a.code = $2);

-- name: rescue_partition
-- Count a rescue; of many processes that see the same stall one gets a row.
UPDATE partition_progress SET rescues = rescues + 1, updated_at = $3
WHERE run_id = $1 AND partition_id = $2 AND rescues = $4 AND NOT completed RETURNING run_id;

-- name: list_stalled_consolidations
-- Consolidations without progress since $1.
SELECT run_id, trace_id, rescues, forced_by IS NOT NULL AS is_forced
FROM run_metadata WHERE state = {run.CONSOLIDATING} AND touched_at < $1;

-- name: rescue_run
-- Count a rescue; of many processes that see the same stall one gets a row.
UPDATE run_metadata SET rescues = rescues + 1, touched_at = $2
WHERE run_id = $1 AND rescues = $3 AND state = {run.CONSOLIDATING} RETURNING run_id;

-- name: make_rejects_pending
-- H11: the next run maps the rejected records of a failed run again.
INSERT INTO raw_pending AS p (feed, key, version)
SELECT r.feed, r.key, r.version FROM raw_record r
WHERE r.feed = $1 AND r.key IN (SELECT key FROM harvest_reject WHERE run_id = $2 AND key IS NOT NULL)
ORDER BY r.key
ON CONFLICT (feed, key) DO UPDATE SET version = greatest(p.version, excluded.version);

-- name: read_watermark
-- H8: the content of the copy.
SELECT watermark, watermark_run, watermark_at FROM harvest_feed WHERE feed = $1;

-- name: prune_runs
-- Delete old runs, but never the last run of a feed.
WITH old AS (
    SELECT run_id FROM run_metadata r
    WHERE touched_at < $1 AND state NOT IN {run.active}
      AND EXISTS (SELECT FROM run_metadata later WHERE later.feed = r.feed AND later.started_at > r.started_at)
    LIMIT 100
), rejects AS (
    DELETE FROM harvest_reject WHERE run_id IN (SELECT run_id FROM old)
), plans AS (
    DELETE FROM harvest_plan WHERE run_id IN (SELECT run_id FROM old) OR (state = {plan.FAILED} AND touched_at < $1)
), alerts AS (
    DELETE FROM harvest_alert WHERE raised_at < $1
), deleted AS (
    DELETE FROM run_metadata WHERE run_id IN (SELECT run_id FROM old) RETURNING 1
)
SELECT count(*) FROM deleted;

-- name: insert_alert
-- Insert an alert, which is sent after the commit.
INSERT INTO harvest_alert (feed, run_id, code, severity, message, raised_at, due_at) VALUES ($1, $2, $3, $4, $5, $6, $6);

-- name: lock_due_alert
-- The next alert to deliver, locked until the end of the transaction.
SELECT id, feed, run_id, code, severity, message, raised_at, delivered_to, attempts
FROM harvest_alert WHERE NOT is_settled AND due_at <= $1 ORDER BY due_at LIMIT 1 FOR UPDATE SKIP LOCKED;

-- name: record_delivery
-- Record the result of a delivery.
UPDATE harvest_alert SET delivered_to = $2, attempts = attempts + 1, due_at = $3, error = $4, is_settled = $5 WHERE id = $1;

-- name: count_undelivered_alerts
-- The number of alerts that a channel has not accepted yet.
SELECT count(*) FROM harvest_alert WHERE NOT is_settled;

-- name: list_alerts
-- The alerts of a feed, newest first.
SELECT id, feed, run_id, code, severity, message, raised_at, delivered_to, attempts, error, is_settled
FROM harvest_alert WHERE feed = $1 ORDER BY id DESC LIMIT $2;
