-- name: runs
-- The latest first; a run that is being planned, or could not be, is among them.
SELECT
    coalesce(r.run_id, p.run_id) AS run_id,
    p.feed,
    coalesce(r.run_type, p.run_type) AS run_type,
    coalesce(r.state, p.state) AS state,
    CASE
        WHEN r.run_id IS NULL THEN p.state
        WHEN r.completed_at IS NOT NULL THEN 'completed'
        WHEN r.failed_workers > 0 THEN 'failed'
        WHEN r.completed_workers < r.expected_workers THEN 'in_progress'
        ELSE 'consolidating'
    END AS status,
    r.expected_workers, r.completed_workers, r.failed_workers, r.watermark_before, r.watermark_after, r.upper_bound,
    p.requested_by, p.requested_at, r.started_at, r.completed_at, p.trace_id, p.counts, r.pricing_version,
    r.forced_by, r.forced_because, coalesce(r.error, p.error) AS error, r.deleted,
    (r.heatmap ->> 'total')::bigint AS counted,
    (SELECT coalesce(sum(seen), 0) FROM partition_progress WHERE run_id = p.run_id) AS records,
    coalesce(r.consolidated, 0) AS consolidated,
    (SELECT count(DISTINCT coalesce(key, left(payload, 1000))) FROM harvest_reject WHERE run_id = p.run_id) AS rejected,
    EXTRACT(EPOCH FROM coalesce(r.completed_at, $6) - r.started_at) / 60 AS duration_minutes,
    p.moves || coalesce(r.moves, '{}') AS moves
FROM harvest_plan p
LEFT JOIN run_metadata r USING (run_id)
WHERE ($1::text IS NULL OR p.feed = $1)
  AND ($2::uuid IS NULL OR p.run_id = $2)
  AND ($3::timestamptz IS NULL OR (p.requested_at, p.run_id) < ($3, $4::uuid))
ORDER BY p.requested_at DESC, p.run_id DESC
LIMIT $5;

-- name: heatmap
SELECT heatmap FROM run_metadata WHERE run_id = $1;

-- name: partitions
SELECT
    p.partition_id, p.kind, p.lower_bound, p.upper_bound, p.counted, p.next_offset, p.completed, p.scan, p.seen, p.rescues,
    coalesce(w.status, 'pending') AS status, w.worker_id, w.error_message AS error, w.started_at, w.completed_at,
    p.updated_at
FROM partition_progress p
LEFT JOIN worker_runs w USING (run_id, partition_id)
WHERE p.run_id = $1
ORDER BY length(p.partition_id), p.partition_id;

-- name: feeds
SELECT
    feed, watermark, watermark_run, watermark_at,
    CASE WHEN paused_until > $2 THEN paused_until END AS paused_until,
    CASE WHEN paused_until > $2 THEN paused_because END AS paused_because,
    (SELECT count(*) FROM raw_pending WHERE raw_pending.feed = harvest_feed.feed) AS pending
FROM harvest_feed WHERE feed = ANY ($1::text[]);

-- name: watermarks
SELECT run_id, last_updated_at, run_completed_at FROM harvest_watermark
WHERE feed = $1 ORDER BY run_completed_at DESC LIMIT $2;

-- name: rejects
SELECT id, key, reason, payload, rejected_at FROM harvest_reject
WHERE run_id = $1 AND id > $2 ORDER BY id LIMIT $3;

-- name: record
SELECT
    raw.key, raw.payload::text, raw.source_updated_at, raw.version AS raw_version, raw.seen_run, raw.seen_in, raw.is_gone,
    raw.changed_at AS raw_changed_at, pending.key IS NOT NULL AS is_pending,
    made.fields::text, made.cost, made.price, made.rule, made.pricing_version, made.run_id, made.version, made.changed_at,
    made.deleted_at
FROM raw_record raw
LEFT JOIN raw_pending pending USING (feed, key)
LEFT JOIN canonical_record made USING (feed, key)
WHERE raw.feed = $1 AND raw.key = $2;
