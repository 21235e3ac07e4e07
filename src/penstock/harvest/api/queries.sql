-- name: list_runs
-- Runs of all feeds, newest first.
SELECT * FROM harvest_run
WHERE ($1::timestamptz IS NULL OR (requested_at, run_id) < ($1, $2::uuid))
ORDER BY requested_at DESC, run_id DESC
LIMIT $3;

-- name: list_runs_of_feed
-- Runs of one feed, newest first. A separate statement, because one statement for both has one plan for both.
SELECT * FROM harvest_run
WHERE feed = $4 AND ($1::timestamptz IS NULL OR (requested_at, run_id) < ($1, $2::uuid))
ORDER BY requested_at DESC, run_id DESC
LIMIT $3;

-- name: read_last_ended_run
-- The latest run of a feed that has ended.
SELECT * FROM harvest_run
WHERE feed = $1 AND state = ANY ($2::text[]) ORDER BY requested_at DESC, run_id DESC LIMIT 1;

-- name: read_run
-- One run.
SELECT * FROM harvest_run WHERE run_id = $1;

-- name: list_pricing
-- H7: the versions of the pricing rules, newest first.
SELECT version, rules, created_at FROM harvest_pricing WHERE feed = $1 ORDER BY version DESC LIMIT $2;

-- name: read_heatmap
-- H3: counts of the partitions and of the source.
SELECT heatmap FROM run_metadata WHERE run_id = $1;

-- name: list_partitions
-- The partitions of a run, in the order of their numbers.
SELECT
    p.partition_id, p.kind, p.lower_bound, p.upper_bound, p.counted, p.next_offset, p.completed, p.scan, p.seen, p.rescues,
    coalesce(w.status, 'pending') AS status, w.worker_id, w.error_message AS error, w.started_at, w.completed_at,
    p.updated_at
FROM partition_progress p
LEFT JOIN worker_runs w USING (run_id, partition_id)
WHERE p.run_id = $1
ORDER BY length(p.partition_id), p.partition_id;

-- name: read_feed
-- The watermark, the pause and the pending records of a feed.
SELECT
    feed, watermark, watermark_run, watermark_at,
    CASE WHEN paused_until > $2 THEN paused_until END AS paused_until,
    CASE WHEN paused_until > $2 THEN pause_reason END AS pause_reason,
    (SELECT count(*) FROM raw_pending WHERE raw_pending.feed = harvest_feed.feed) AS pending
FROM harvest_feed WHERE feed = $1;

-- name: list_watermarks
-- H13: the history of the watermark, newest first.
SELECT run_id, last_updated_at, run_completed_at FROM harvest_watermark
WHERE feed = $1 ORDER BY run_completed_at DESC LIMIT $2;

-- name: list_rejects
-- The rejected records of a run, oldest first.
SELECT id, key, reason, payload, rejected_at FROM harvest_reject
WHERE run_id = $1 AND id > $2 ORDER BY id LIMIT $3;

-- name: read_record
-- One record: as the source sent it, and as it is served.
SELECT
    raw.key, raw.payload::text, raw.source_updated_at, raw.version AS raw_version, raw.seen_run, raw.seen_in,
    raw.is_deleted, raw.changed_at AS raw_changed_at, pending.key IS NOT NULL AS is_pending,
    canonical.fields::text, canonical.cost, canonical.price, canonical.rule, canonical.pricing_version, canonical.run_id,
    canonical.version, canonical.changed_at, canonical.deleted_at
FROM raw_record raw
LEFT JOIN raw_pending pending USING (feed, key)
LEFT JOIN canonical_record canonical USING (feed, key)
WHERE raw.feed = $1 AND raw.key = $2;

-- name: list_delivery_problems
-- The alerts with a failed delivery by feed: not settled yet, or given up and raised after $1.
SELECT feed, is_settled, count(*) AS alerts, min(raised_at) AS since, (array_agg(error ORDER BY id DESC))[1] AS error
FROM harvest_alert
WHERE error IS NOT NULL AND (NOT is_settled OR raised_at > $1)
GROUP BY feed, is_settled
ORDER BY feed, is_settled;
