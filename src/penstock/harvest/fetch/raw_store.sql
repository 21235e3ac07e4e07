-- name: store_records
-- H4, H16: store records of a page. They are written in the order of keys, so that two writers of the same records wait for
-- each other instead of deadlocking. A record older than the stored one is only marked as seen. Return how many records this
-- pass had not seen yet, and how many of them an earlier pass should have seen.
WITH received AS MATERIALIZED (
    SELECT input.key, input.payload::jsonb AS payload, input.updated_at, r.seen_run, r.seen_in, r.seen_scan
    FROM unnest($3::text[], $4::text[], $5::timestamptz[]) AS input (key, payload, updated_at)
    -- One index lookup per record, even under a plan that was made when the table was empty.
    LEFT JOIN LATERAL (
        SELECT * FROM raw_record stored WHERE stored.feed = $1 AND stored.key = input.key OFFSET 0
    ) AS r ON true
), stored AS (
    INSERT INTO raw_record AS r (
        feed, key, payload, source_updated_at, version, seen_run, seen_in, seen_scan, changed_at)
    SELECT $1, key, payload, updated_at, 1, $2, $6, $7, $9 FROM received
    ON CONFLICT (feed, key) DO UPDATE
    SET (payload, source_updated_at, version, changed_at) = (
            SELECT
                CASE WHEN is_newer THEN excluded.payload ELSE r.payload END,
                CASE WHEN is_newer THEN excluded.source_updated_at ELSE r.source_updated_at END,
                CASE WHEN is_changed THEN r.version + 1 ELSE r.version END,
                CASE WHEN is_changed THEN excluded.changed_at ELSE r.changed_at END
            FROM (SELECT coalesce(excluded.source_updated_at >= r.source_updated_at, true) AS is_newer) AS age
            CROSS JOIN LATERAL (
                SELECT r.is_deleted OR (is_newer AND excluded.payload <> r.payload) AS is_changed
            ) AS change
        ),
        seen_run = excluded.seen_run,
        seen_in = excluded.seen_in,
        seen_scan = excluded.seen_scan,
        is_deleted = false
    RETURNING key, version, changed_at
), pending AS (
    INSERT INTO raw_pending AS p (feed, key, version)
    SELECT $1, key, version FROM stored WHERE changed_at = $9
    ON CONFLICT (feed, key) DO UPDATE SET version = greatest(p.version, excluded.version)
)
SELECT
    count(*) FILTER (WHERE (seen_run, seen_in, seen_scan) IS DISTINCT FROM ($2, $6, $7)) AS seen,
    count(*) FILTER (WHERE seen_run IS DISTINCT FROM $2 AND coalesce(updated_at < $8, $7 > 1)) AS missed
FROM received;

-- name: mark_seen
-- H10: a record that cannot be stored still exists in the source.
UPDATE raw_record SET seen_run = $2, seen_in = $3, seen_scan = $4
WHERE feed = $1 AND key = ANY ($5::text[]) AND NOT is_deleted;

-- name: is_storable
-- The cast goes through text: asyncpg would encode a jsonb parameter as a JSON text of the text.
SELECT $1::text::jsonb IS NOT NULL;

-- name: insert_rejects
-- Reject records, and count them in their run.
WITH rejected AS (
    INSERT INTO harvest_reject (run_id, feed, key, reason, payload, rejected_at)
    SELECT $1, $2, key, reason, left(payload, 10000), $6
    FROM unnest($3::text[], $4::text[], $5::text[]) AS input (key, reason, payload)
)
UPDATE run_metadata SET rejected = rejected + cardinality($3::text[]) WHERE run_id = $1;
