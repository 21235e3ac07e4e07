-- name: consolidate_set
-- Consolidate pending raw records, in the order of their keys. Return how many were taken, up to which key, and the results.
-- `sql_compiler` inserts expressions of the mapping; names and values are parameters.
--
-- Why no change is lost: a change of a raw record writes its new version to both tables in one transaction. If there was no
-- change since the snapshot of this statement, the raw record in the snapshot has the version of the locked row, and a new
-- change waits for the lock, then finds the row deleted and inserts it again. If there was a change, the lock returns the new
-- row, whose version is not in the snapshot: the row joins nothing and stays, like its new tuple, which is invisible here.
WITH taken AS MATERIALIZED (
    SELECT ctid AS tid, key, version FROM raw_pending
    WHERE feed = $1 AND key > $2
    ORDER BY key
    LIMIT $3
    FOR UPDATE SKIP LOCKED
), mapped AS MATERIALIZED (
    SELECT tid, key, version, is_deleted, problem,
           CASE WHEN problem IS NULL THEN {fields} END AS fields,
           cost, rule,
           CASE WHEN problem IS NOT NULL THEN left(payload::text, 10000) END AS excerpt
    FROM (
        SELECT *, {problem} AS problem, {cost} AS cost, {rule} AS rule
        FROM (
            SELECT *{values}
            FROM (
                SELECT taken.tid, taken.key, taken.version, raw.is_deleted, raw.payload{texts}
                FROM taken CROSS JOIN LATERAL (
                    SELECT payload, is_deleted FROM raw_record
                    WHERE feed = $1 AND key = taken.key AND version = taken.version
                    OFFSET 0
                ) AS raw
                OFFSET 0  -- an optimization fence: without it the planner evaluates each text at every use
            ) AS texts
            OFFSET 0
        ) AS parsed
        OFFSET 0
    ) AS priced
), consolidated AS (
    INSERT INTO canonical_record AS canonical
        (feed, key, fields, cost, price, rule, pricing_version, run_id, version, changed_at, deleted_at)
    SELECT $1, key, fields, cost, {price}, {rule_name}, $5::integer, $4::uuid, version, $6::timestamptz, CASE WHEN is_deleted THEN $6::timestamptz END
    FROM mapped
    WHERE problem IS NULL
    ON CONFLICT (feed, key) DO UPDATE
    SET fields = excluded.fields, cost = excluded.cost, price = excluded.price, rule = excluded.rule,
        pricing_version = excluded.pricing_version, run_id = excluded.run_id, version = excluded.version,
        changed_at = excluded.changed_at,
        deleted_at = CASE WHEN excluded.deleted_at IS NOT NULL
                          THEN coalesce(canonical.deleted_at, excluded.deleted_at) END
    WHERE excluded.version >= canonical.version
), rejected AS (
    INSERT INTO harvest_reject (run_id, feed, key, reason, payload, rejected_at)
    SELECT $4::uuid, $1, key, problem, excerpt, $6::timestamptz FROM mapped WHERE problem IS NOT NULL
), marked AS (
    DELETE FROM raw_pending WHERE ctid = ANY (ARRAY(SELECT tid FROM mapped))
)
SELECT (SELECT count(*) FROM taken) AS taken,
       (SELECT max(key) FROM taken) AS last,
       (SELECT count(*) FROM mapped WHERE problem IS NULL) AS consolidated,
       (SELECT count(*) FROM mapped WHERE problem IS NOT NULL) AS rejected;

-- name: fetch_batch
-- Take the same rows for Python: the texts of each, or null if the raw record has another version than the locked row.
WITH taken AS MATERIALIZED (
    SELECT ctid AS tid, key, version FROM raw_pending
    WHERE feed = $1 AND key > $2
    ORDER BY key
    LIMIT $3
    FOR UPDATE SKIP LOCKED
)
SELECT taken.tid, taken.key, taken.version, raw.is_deleted, raw.texts
FROM taken LEFT JOIN LATERAL (
    SELECT is_deleted, ARRAY[{texts}]::text[] AS texts FROM raw_record
    WHERE feed = $1 AND key = taken.key AND version = taken.version
    OFFSET 0
) AS raw ON true
ORDER BY taken.key;

-- name: upsert_canonical
-- Store canonical records made in Python. Idempotent: a newer record stays.
INSERT INTO canonical_record AS canonical
    (feed, key, fields, cost, price, rule, pricing_version, run_id, version, changed_at, deleted_at)
SELECT $1, key, fields::jsonb, cost, price, rule, $3::integer, $2::uuid, version, $4::timestamptz, CASE WHEN is_deleted THEN $4::timestamptz END
FROM unnest($5::text[], $6::text[], $7::numeric[], $8::numeric[], $9::text[], $10::bigint[], $11::boolean[])
    AS input (key, fields, cost, price, rule, version, is_deleted)
ON CONFLICT (feed, key) DO UPDATE
SET fields = excluded.fields, cost = excluded.cost, price = excluded.price, rule = excluded.rule,
    pricing_version = excluded.pricing_version, run_id = excluded.run_id, version = excluded.version,
    changed_at = excluded.changed_at,
    deleted_at = CASE WHEN excluded.deleted_at IS NOT NULL
                      THEN coalesce(canonical.deleted_at, excluded.deleted_at) END
WHERE excluded.version >= canonical.version;

-- name: insert_rejects
-- Reject raw records that Python could not map. Their pending rows are locked, so they have not changed.
INSERT INTO harvest_reject (run_id, feed, key, reason, payload, rejected_at)
SELECT $2, $1, key, reason, left((SELECT payload::text FROM raw_record WHERE feed = $1 AND key = input.key), 10000), $3
FROM unnest($4::text[], $5::text[]) AS input (key, reason);

-- name: delete_pending
-- Delete the pending rows that this transaction has locked.
DELETE FROM raw_pending WHERE ctid = ANY ($1::tid[]);

-- name: await_first_pending
-- Wait for the lock of the first pending row, without other locks; no row: nothing is pending.
SELECT key FROM raw_pending WHERE feed = $1 ORDER BY key LIMIT 1 FOR UPDATE;

-- name: lock_mapping
-- Lock the mapping of the feed until the end of the transaction; no row: the feed has another mapping now.
SELECT mapping FROM harvest_feed WHERE feed = $1 AND mapping = $2 FOR SHARE;

-- name: force_index_lookups
-- Find rows by their keys even if the planner estimates small tables; correct for every size.
SELECT set_config(setting, 'off', true)
FROM unnest(ARRAY['enable_seqscan', 'enable_bitmapscan', 'enable_hashjoin', 'enable_mergejoin', 'jit']) AS setting
UNION ALL SELECT set_config('work_mem', '64MB', true);

-- name: read_latest_pricing
-- The pricing rules that were used last.
SELECT version, digest FROM harvest_pricing WHERE feed = $1 ORDER BY version DESC LIMIT 1;

-- name: insert_pricing
-- H7: insert new pricing rules under the next version.
INSERT INTO harvest_pricing (feed, version, rules, digest, created_at) VALUES ($1, $2, $3::text::jsonb, $4, $5);

-- name: read_mapping
-- The digest of the mapping that made the canonical records; null: there are none yet.
SELECT mapping FROM harvest_feed WHERE feed = $1;

-- name: set_mapping
-- Set the mapping of the canonical records.
UPDATE harvest_feed SET mapping = $2 WHERE feed = $1;

-- name: make_all_pending
-- Make all records pending. Pending rows are updated too: the holder of a lock may consolidate with the old mapping.
INSERT INTO raw_pending AS pending (feed, key, version)
SELECT feed, key, version FROM raw_record WHERE feed = $1 ORDER BY key
ON CONFLICT (feed, key) DO UPDATE SET version = greatest(pending.version, excluded.version);
