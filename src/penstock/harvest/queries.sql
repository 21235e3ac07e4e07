-- name: know_feed
-- Have a row for the feed.
INSERT INTO harvest_feed (feed) VALUES ($1) ON CONFLICT DO NOTHING;

-- name: lock_feed
-- Whoever decides about a feed as a whole holds its row.
SELECT watermark, watermark_run, watermark_at FROM harvest_feed WHERE feed = $1 FOR UPDATE;

-- name: active
-- The run of a feed that is being planned or under way.
SELECT run_id FROM harvest_plan WHERE feed = $1 AND state = {plan.PLANNING}
UNION ALL
SELECT run_id FROM run_metadata WHERE feed = $1 AND state IN {run.active}
LIMIT 1;

-- name: latest
-- The last run of a feed that was begun.
SELECT run_id FROM run_metadata WHERE feed = $1 ORDER BY started_at DESC, run_id DESC LIMIT 1;

-- name: last_asked
-- When a run of the feed was last asked for.
SELECT max(requested_at) FROM harvest_plan WHERE feed = $1;

-- name: last_full
-- When the last full run that completed was begun.
SELECT max(started_at) FROM run_metadata WHERE feed = $1 AND run_type = 'full' AND state = {run.COMPLETED};

-- name: close_breaker
-- Somebody wants it tried now. While no failures in a row stopped it, a pause is the source's own, and stays.
UPDATE harvest_feed SET breaks = 0, failures = 0, probed_at = NULL, paused_until = NULL WHERE feed = $1 AND breaks > 0;

-- name: ask
-- A run is wanted.
INSERT INTO harvest_plan (run_id, feed, run_type, state, requested_by, requested_at, touched_at, trace_id, moves)
VALUES ($1, $2, $3, {plan.PLANNING}, $4, $5, $5, $6, $7);

-- name: plan
-- A run that is asked for, with the watermark it would begin at.
SELECT p.*, f.watermark FROM harvest_plan p JOIN harvest_feed f USING (feed) WHERE p.run_id = $1;

-- name: count_progress
-- How far the counting is.
UPDATE harvest_plan SET counts = $2, touched_at = $3 WHERE run_id = $1 AND state = {plan.PLANNING};

-- name: settle_plan
-- It became a run, or could not; no row back means another did it.
UPDATE harvest_plan
SET state = $2, counts = $3, error = $4, touched_at = $5
WHERE run_id = $1 AND state = {plan.PLANNING}
RETURNING feed;

-- name: note_plan_moves
-- What the journal noted of a plan.
UPDATE harvest_plan SET moves = moves || $2::bigint[] WHERE run_id = $1;

-- name: create_run
-- The run, counted and cut; nobody works on it yet.
INSERT INTO run_metadata (
    run_id, feed, run_type, expected_workers, watermark_before, started_at, state, upper_bound, trace_id, requested_by,
    heatmap, touched_at, moves)
VALUES ($1, $2, $3, $4, $5, $6, {run.CREATED}, $7, $8, $9, $10, $6, $11);

-- name: create_partitions
-- Its partitions, each with what the source counted in it.
INSERT INTO partition_progress (
    run_id, partition_id, kind, lower_bound, upper_bound, counted, scan_started_at, created_at, updated_at)
SELECT $1, partition_id, kind, lower_bound, upper_bound, counted, $7, $7, $7
FROM unnest($2::text[], $3::text[], $4::bigint[], $5::bigint[], $6::integer[])
    AS given (partition_id, kind, lower_bound, upper_bound, counted);

-- name: run
-- A run, as it stands.
SELECT * FROM run_metadata WHERE run_id = $1;

-- name: lock_run
-- A run, held until the end of the transaction.
SELECT * FROM run_metadata WHERE run_id = $1 FOR UPDATE;

-- name: task
-- H4: the partition a message is about, as it stands.
SELECT p.*, r.feed, r.run_type, r.state, r.watermark_before, r.upper_bound AS run_upper_bound, r.trace_id, w.status
FROM partition_progress p
JOIN run_metadata r USING (run_id)
LEFT JOIN worker_runs w USING (run_id, partition_id)
WHERE p.run_id = $1 AND p.partition_id = $2;

-- name: lock_partition
-- Hold a partition until the end of the transaction.
SELECT partition_id FROM partition_progress WHERE run_id = $1 AND partition_id = $2 FOR UPDATE;

-- name: advance
-- H4: the founding document's compare-and-set, with what else is kept of a pass.
UPDATE partition_progress
SET next_offset = $4,
    next_cursor = $5,
    scan = $6,
    told = $12,
    seen = $7,
    missed = $8,
    was_clean = $13,
    counted = $9,
    last_scan_at = CASE WHEN scan = $6 THEN last_scan_at ELSE scan_started_at END,
    scan_started_at = CASE WHEN scan = $6 THEN scan_started_at ELSE $11::timestamptz END,
    completed = $10,
    rescues = 0,
    waits_until = NULL,
    updated_at = $11::timestamptz
WHERE run_id = $1
  AND partition_id = $2
  AND next_offset = $3
  AND NOT completed;

-- name: note_work
-- Who works on a partition, how far it is, and whether it has ended.
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
-- H5: the founding document's counters, both at once.
UPDATE run_metadata
SET completed_workers = completed_workers + $2, failed_workers = failed_workers + $3, touched_at = $4
WHERE run_id = $1 AND state IN {run.fetching}
RETURNING completed_workers, expected_workers, failed_workers;

-- name: move_run
-- A move of a run, if it stands where the move begins; no row back means it does not.
UPDATE run_metadata
SET state = $2, error = $4, touched_at = $5, rescues = 0
WHERE run_id = $1 AND state = $3
RETURNING run_id;

-- name: force_run
-- H5: who wanted it consolidated all the same, and why.
UPDATE run_metadata SET forced_by = $2, forced_because = $3 WHERE run_id = $1;

-- name: unforce_run
-- A run that is taken up again is judged like any other.
UPDATE run_metadata SET forced_by = NULL, forced_because = NULL WHERE run_id = $1;

-- name: failed_partitions
-- Those that failed, with where they stand.
SELECT p.partition_id, p.next_offset, p.scan
FROM partition_progress p
JOIN worker_runs w USING (run_id, partition_id)
WHERE p.run_id = $1 AND w.status IN {partition.retry} AND ($2::text IS NULL OR p.partition_id = $2)
ORDER BY p.partition_id;

-- name: revive_partitions
-- H11: failed partitions are taken up again where they stopped. A pass that failed for moving rows begins anew.
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

-- name: all_partitions
-- All partitions of a run, held until the end of the transaction, in order.
SELECT partition_id FROM partition_progress WHERE run_id = $1 ORDER BY partition_id FOR UPDATE;

-- name: unfinished_partitions
-- All partitions of a run that have not ended.
SELECT p.partition_id, p.seen
FROM partition_progress p
LEFT JOIN worker_runs w USING (run_id, partition_id)
WHERE p.run_id = $1 AND NOT p.completed AND (w.status IS NULL OR w.status = {partition.RUNNING})
ORDER BY p.partition_id;

-- name: touch_consolidating
-- Something is done for it; no row back: it is not to be consolidated any more. Who may be late writes under this lock.
UPDATE run_metadata SET touched_at = $2 WHERE run_id = $1 AND state = {run.CONSOLIDATING} RETURNING run_id;

-- name: use_pricing
-- H7: the rules the run uses.
UPDATE run_metadata SET pricing_version = $2 WHERE run_id = $1;

-- name: note_consolidated
-- What one transaction consolidated, counted in it.
UPDATE run_metadata SET consolidated = consolidated + $2, rejected = rejected + $3, touched_at = $4 WHERE run_id = $1;

-- name: note_moves
-- What the journal noted of a run and its partitions.
UPDATE run_metadata SET moves = moves || $2::bigint[] WHERE run_id = $1;

-- name: rejected
-- How many records of a run were set aside, each counted once, and how many it has seen.
SELECT
    (SELECT count(DISTINCT coalesce(key, left(payload, 1000))) FROM harvest_reject WHERE run_id = $1) AS rejected,
    (SELECT coalesce(sum(seen), 0) FROM partition_progress WHERE run_id = $1) AS seen;

-- name: is_pending
-- Whether some raw record of the feed is not consolidated.
SELECT EXISTS (SELECT FROM raw_pending WHERE feed = $1);

-- name: complete_run
-- H8: with the watermark, in one transaction.
UPDATE run_metadata
SET state = {run.COMPLETED}, completed_at = $2, watermark_after = $3, deleted = $4, touched_at = $2, error = NULL
WHERE run_id = $1 AND state IN {run.complete}
RETURNING feed;

-- name: feed_watermarks
-- Up to when feeds are known.
SELECT feed, watermark FROM harvest_feed WHERE feed = ANY ($1::text[]) AND watermark IS NOT NULL;

-- name: save_watermark
-- H9: it never goes back.
UPDATE harvest_feed
SET watermark = greatest(watermark, $2), watermark_run = $3, watermark_at = $4
WHERE feed = $1
RETURNING watermark;

-- name: note_watermark
-- H13: the history of the watermark.
INSERT INTO harvest_watermark (feed, run_id, last_updated_at, run_completed_at) VALUES ($1, $2, $3, $4);

-- name: has_strangers
-- Whether the run set records aside that do not tell what they are called.
SELECT EXISTS (SELECT FROM harvest_reject WHERE run_id = $1 AND key IS NULL);

-- name: runs_since_last_full
-- The run, and all since the last full one before it that completed; none where there is no such run.
SELECT r.run_id FROM run_metadata r
WHERE r.feed = $1 AND r.started_at >= (
    SELECT max(started_at) FROM run_metadata
    WHERE feed = $1 AND run_id <> $2 AND run_type = 'full' AND state = {run.COMPLETED} AND failed_workers = 0);

-- name: plan_at_ease
-- What reads a whole feed: as the planner likes, for as long as it takes.
SELECT set_config('statement_timeout', '0', true);

-- name: standing
-- H10: how many records are live, and how many of those none of the runs saw.
SELECT count(*) AS live, count(*) FILTER (WHERE seen_run <> ALL ($2::uuid[])) AS unseen
FROM raw_record WHERE feed = $1 AND NOT is_gone;

-- name: soft_delete
-- H10: what none of the runs saw is gone.
WITH gone AS (
    UPDATE raw_record SET is_gone = true WHERE feed = $1 AND seen_run <> ALL ($2::uuid[]) AND NOT is_gone RETURNING key
), marked AS (
    UPDATE canonical_record c SET deleted_at = $3, run_id = $4, changed_at = $3
    FROM gone WHERE c.feed = $1 AND c.key = gone.key AND c.deleted_at IS NULL
    RETURNING 1
)
SELECT count(*) FROM marked;

-- name: publish
-- What dictionaries read becomes what the canonical records are now; how many differ.
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

-- name: stalled_plans
-- Plans for which nothing was done for a long time.
SELECT run_id, feed, trace_id, rescues FROM harvest_plan WHERE state = {plan.PLANNING} AND touched_at < $1;

-- name: rescue_plan
-- One of many processes that saw it standing still.
UPDATE harvest_plan SET rescues = rescues + 1, touched_at = $2
WHERE run_id = $1 AND rescues = $3 AND state = {plan.PLANNING} RETURNING run_id;

-- name: stalled_partitions
-- Partitions of runs under way for which nothing was done for a long time.
SELECT p.run_id, p.partition_id, p.next_offset, p.scan, p.rescues, r.trace_id
FROM run_metadata r
JOIN partition_progress p USING (run_id)
LEFT JOIN worker_runs w USING (run_id, partition_id)
WHERE r.state IN {run.fetching} AND NOT p.completed AND p.updated_at < $1 AND p.waits_until IS NULL
  AND (w.status IS NULL OR w.status = {partition.RUNNING})
ORDER BY p.run_id, p.partition_id
LIMIT 100;

-- name: park
-- H15: the partition waits for its source without a message, which would hold up those of other feeds.
UPDATE partition_progress SET waits_until = $4
WHERE run_id = $1 AND partition_id = $2 AND next_offset = $3 AND NOT completed;

-- name: unpark
-- Those whose pause is over, some at a time.
UPDATE partition_progress p SET waits_until = NULL
FROM (
    SELECT run_id, partition_id FROM partition_progress WHERE waits_until <= $1
    ORDER BY waits_until LIMIT 100 FOR UPDATE SKIP LOCKED
) AS due, run_metadata r
WHERE p.run_id = due.run_id AND p.partition_id = due.partition_id AND r.run_id = p.run_id
RETURNING p.run_id, p.partition_id, p.next_offset, p.scan, r.trace_id;

-- name: becalmed
-- Runs of which no page was kept for a long time, and nobody was told of it.
SELECT r.run_id, r.feed FROM run_metadata r
WHERE r.state IN {run.fetching}
  AND (SELECT max(updated_at) FROM partition_progress p WHERE p.run_id = r.run_id) < $1
  AND NOT EXISTS (SELECT FROM harvest_alert a WHERE a.run_id = r.run_id AND a.code = $2);

-- name: rescue_partition
-- One of many processes that saw it standing still.
UPDATE partition_progress SET rescues = rescues + 1, updated_at = $3
WHERE run_id = $1 AND partition_id = $2 AND rescues = $4 AND NOT completed RETURNING run_id;

-- name: stalled_consolidations
-- Consolidations for which nothing was done for a long time.
SELECT run_id, trace_id, rescues, forced_by IS NOT NULL AS is_forced
FROM run_metadata WHERE state = {run.CONSOLIDATING} AND touched_at < $1;

-- name: rescue_run
-- One of many processes that saw it standing still.
UPDATE run_metadata SET rescues = rescues + 1, touched_at = $2
WHERE run_id = $1 AND rescues = $3 AND state = {run.CONSOLIDATING} RETURNING run_id;

-- name: make_rejects_pending
-- H11: what a failed run could not map is tried again by the next.
INSERT INTO raw_pending AS p (feed, key, version)
SELECT r.feed, r.key, r.version FROM raw_record r
WHERE r.feed = $1 AND r.key IN (SELECT key FROM harvest_reject WHERE run_id = $2 AND key IS NOT NULL)
ORDER BY r.key
ON CONFLICT (feed, key) DO UPDATE SET version = greatest(p.version, excluded.version);

-- name: watermark
-- H8: what the copy has to say.
SELECT watermark, watermark_run, watermark_at FROM harvest_feed WHERE feed = $1;

-- name: prune_runs
-- Forget old runs, but never the last of a feed.
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
), gone AS (
    DELETE FROM run_metadata WHERE run_id IN (SELECT run_id FROM old) RETURNING 1
)
SELECT count(*) FROM gone;

-- name: raise_alert
-- Something somebody has to be told of, as soon as this commits.
INSERT INTO harvest_alert (feed, run_id, code, severity, message, raised_at, due_at) VALUES ($1, $2, $3, $4, $5, $6, $6);

-- name: due_alert
-- The next alert to be told, held until the end of the transaction.
SELECT id, feed, run_id, code, severity, message, raised_at, told, attempts
FROM harvest_alert WHERE NOT is_told AND due_at <= $1 ORDER BY due_at LIMIT 1 FOR UPDATE SKIP LOCKED;

-- name: note_alert
-- What came of telling an alert.
UPDATE harvest_alert SET told = $2, attempts = attempts + 1, due_at = $3, error = $4, is_told = $5 WHERE id = $1;

-- name: count_untold_alerts
-- How many alerts some channel has not taken yet.
SELECT count(*) FROM harvest_alert WHERE NOT is_told;

-- name: latest_alerts
-- What somebody was told of, the latest first.
SELECT id, feed, run_id, code, severity, message, raised_at, told AS delivered_to, attempts, error, is_told AS is_settled
FROM harvest_alert WHERE feed = $1 ORDER BY id DESC LIMIT $2;
