-- name: runs
-- The latest first.
SELECT *, forced_because AS force_reason FROM harvest_run
WHERE ($1::timestamptz IS NULL OR (requested_at, run_id) < ($1, $2::uuid))
ORDER BY requested_at DESC, run_id DESC
LIMIT $3;

-- name: runs_of_feed
-- A statement of its own: one for both would have one plan for both.
SELECT *, forced_because AS force_reason FROM harvest_run
WHERE feed = $4 AND ($1::timestamptz IS NULL OR (requested_at, run_id) < ($1, $2::uuid))
ORDER BY requested_at DESC, run_id DESC
LIMIT $3;

-- name: last_ended_run
-- The latest run of a feed that has ended.
SELECT *, forced_because AS force_reason FROM harvest_run
WHERE feed = $1 AND state = ANY ($2::text[]) ORDER BY requested_at DESC, run_id DESC LIMIT 1;

-- name: run
-- One run.
SELECT *, forced_because AS force_reason FROM harvest_run WHERE run_id = $1;

-- name: pricing
-- H7: the rules there were, the latest first.
SELECT version, rules, created_at FROM harvest_pricing WHERE feed = $1 ORDER BY version DESC LIMIT $2;

-- name: heatmap
-- H3: the proof that the parts are the whole.
SELECT heatmap FROM run_metadata WHERE run_id = $1;

-- name: partitions
-- How far the partitions of a run are, in the order of their numbers.
SELECT
    p.partition_id, p.kind, p.lower_bound, p.upper_bound, p.counted, p.next_offset, p.completed, p.scan, p.seen, p.rescues,
    coalesce(w.status, 'pending') AS status, w.worker_id, w.error_message AS error, w.started_at, w.completed_at,
    p.updated_at
FROM partition_progress p
LEFT JOIN worker_runs w USING (run_id, partition_id)
WHERE p.run_id = $1
ORDER BY length(p.partition_id), p.partition_id;

-- name: feeds
-- Where feeds stand, and whether their source is left alone at the moment.
SELECT
    feed, watermark, watermark_run, watermark_at,
    CASE WHEN paused_until > $2 THEN paused_until END AS paused_until,
    CASE WHEN paused_until > $2 THEN paused_because END AS pause_reason,
    (SELECT count(*) FROM raw_pending WHERE raw_pending.feed = harvest_feed.feed) AS pending
FROM harvest_feed WHERE feed = ANY ($1::text[]);

-- name: watermarks
-- H13: what the watermark was, the latest first.
SELECT run_id, last_updated_at, run_completed_at FROM harvest_watermark
WHERE feed = $1 ORDER BY run_completed_at DESC LIMIT $2;

-- name: rejects
-- Records that were set aside, in the order they were.
SELECT id, key, reason, payload, rejected_at FROM harvest_reject
WHERE run_id = $1 AND id > $2 ORDER BY id LIMIT $3;

-- name: record
-- One record: as the source told it, and as it is served.
SELECT
    raw.key, raw.payload::text, raw.source_updated_at, raw.version AS raw_version, raw.seen_run, raw.seen_in,
    raw.is_gone AS is_deleted,
    raw.changed_at AS raw_changed_at, pending.key IS NOT NULL AS is_pending,
    made.fields::text, made.cost, made.price, made.rule, made.pricing_version, made.run_id, made.version, made.changed_at,
    made.deleted_at
FROM raw_record raw
LEFT JOIN raw_pending pending USING (feed, key)
LEFT JOIN canonical_record made USING (feed, key)
WHERE raw.feed = $1 AND raw.key = $2;
