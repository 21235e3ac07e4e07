-- name: consolidate_set
-- Make canonical records of pending raw ones, in the order of their keys: how many were taken, up to which key, and what
-- became of them. `compiling` fills in what the recipe says; names and values are parameters.
--
-- Why no change is lost: who changes a raw record writes its new version here and there in one transaction. If nobody did
-- since this statement's snapshot, the raw record in the snapshot is the one the locked row speaks of, and who comes now
-- waits for our lock, then finds the row gone and puts it back. If somebody did, the lock gives us their row, whose
-- version is not in our snapshot: it is joined with nothing and stays, as does its new tuple, which we cannot see.
WITH taken AS MATERIALIZED (
    SELECT ctid AS tid, key, version FROM raw_pending
    WHERE feed = $1 AND key > $2
    ORDER BY key
    LIMIT $3
    FOR UPDATE SKIP LOCKED
), judged AS MATERIALIZED (
    SELECT tid, key, version, is_gone, problem,
           CASE WHEN problem IS NULL THEN {fields} END AS fields,
           cost, rule,
           CASE WHEN problem IS NOT NULL THEN left(payload::text, 10000) END AS shown
    FROM (
        SELECT *, {problem} AS problem, {cost} AS cost, {rule} AS rule
        FROM (
            SELECT *{values}
            FROM (
                SELECT taken.tid, taken.key, taken.version, raw.is_gone, raw.payload{texts}
                FROM taken CROSS JOIN LATERAL (
                    SELECT payload, is_gone FROM raw_record
                    WHERE feed = $1 AND key = taken.key AND version = taken.version
                    OFFSET 0
                ) AS raw
                OFFSET 0  -- a fence: else the planner unfolds each text into every place that uses it
            ) AS texts
            OFFSET 0
        ) AS parsed
        OFFSET 0
    ) AS priced
), consolidated AS (
    INSERT INTO canonical_record AS canonical
        (feed, key, fields, cost, price, rule, pricing_version, run_id, version, changed_at, deleted_at)
    SELECT $1, key, fields, cost, {price}, {rule_name}, $5::integer, $4::uuid, version, $6::timestamptz, CASE WHEN is_gone THEN $6::timestamptz END
    FROM judged
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
    SELECT $4::uuid, $1, key, problem, shown, $6::timestamptz FROM judged WHERE problem IS NOT NULL
), marked AS (
    DELETE FROM raw_pending WHERE ctid = ANY (ARRAY(SELECT tid FROM judged))
)
SELECT (SELECT count(*) FROM taken) AS taken,
       (SELECT max(key) FROM taken) AS last,
       (SELECT count(*) FROM judged WHERE problem IS NULL) AS consolidated,
       (SELECT count(*) FROM judged WHERE problem IS NOT NULL) AS rejected;

-- name: fetch_batch
-- The same rows, for Python to map: their texts, or null where the raw record is not of the version the lock found.
WITH taken AS MATERIALIZED (
    SELECT ctid AS tid, key, version FROM raw_pending
    WHERE feed = $1 AND key > $2
    ORDER BY key
    LIMIT $3
    FOR UPDATE SKIP LOCKED
)
SELECT taken.tid, taken.key, taken.version, raw.is_gone, raw.texts
FROM taken LEFT JOIN LATERAL (
    SELECT is_gone, ARRAY[{texts}]::text[] AS texts FROM raw_record
    WHERE feed = $1 AND key = taken.key AND version = taken.version
    OFFSET 0
) AS raw ON true
ORDER BY taken.key;

-- name: upsert
-- Canonical records, made in Python. Idempotent: what is newer stays.
INSERT INTO canonical_record AS canonical
    (feed, key, fields, cost, price, rule, pricing_version, run_id, version, changed_at, deleted_at)
SELECT $1, key, fields::jsonb, cost, price, rule, $3::integer, $2::uuid, version, $4::timestamptz, CASE WHEN is_gone THEN $4::timestamptz END
FROM unnest($5::text[], $6::text[], $7::numeric[], $8::numeric[], $9::text[], $10::bigint[], $11::boolean[])
    AS made (key, fields, cost, price, rule, version, is_gone)
ON CONFLICT (feed, key) DO UPDATE
SET fields = excluded.fields, cost = excluded.cost, price = excluded.price, rule = excluded.rule,
    pricing_version = excluded.pricing_version, run_id = excluded.run_id, version = excluded.version,
    changed_at = excluded.changed_at,
    deleted_at = CASE WHEN excluded.deleted_at IS NOT NULL
                      THEN coalesce(canonical.deleted_at, excluded.deleted_at) END
WHERE excluded.version >= canonical.version;

-- name: reject
-- Raw records Python could not map; as their pending rows are locked, they are still what they were.
INSERT INTO harvest_reject (run_id, feed, key, reason, payload, rejected_at)
SELECT $2, $1, key, reason, left((SELECT payload::text FROM raw_record WHERE feed = $1 AND key = said.key), 10000), $3
FROM unnest($4::text[], $5::text[]) AS said (key, reason);

-- name: mark
-- Rows this transaction has locked are not pending any more.
DELETE FROM raw_pending WHERE ctid = ANY ($1::tid[]);

-- name: wait
-- Wait for whoever holds the first pending row, holding none meanwhile; no row back: nothing is pending.
SELECT key FROM raw_pending WHERE feed = $1 ORDER BY key LIMIT 1 FOR UPDATE;

-- name: hold_recipe
-- The feed is still made by this recipe, and stays so until the end of the transaction; no row back: it is not.
SELECT recipe FROM harvest_feed WHERE feed = $1 AND recipe = $2 FOR SHARE;

-- name: look_up
-- Find rows by their keys, whatever the planner thinks of tables that grew a moment ago; it is right for every size.
SELECT set_config(setting, 'off', true)
FROM unnest(ARRAY['enable_seqscan', 'enable_bitmapscan', 'enable_hashjoin', 'enable_mergejoin', 'jit']) AS setting
UNION ALL SELECT set_config('work_mem', '64MB', true);

-- name: latest_pricing
-- The rules used last.
SELECT version, digest FROM harvest_pricing WHERE feed = $1 ORDER BY version DESC LIMIT 1;

-- name: add_pricing
-- H7: rules that were not used before, under the next version.
INSERT INTO harvest_pricing (feed, version, rules, digest, created_at) VALUES ($1, $2, $3::text::jsonb, $4, $5);

-- name: recipe
-- What the canonical records were last made with; null: there are none yet.
SELECT recipe FROM harvest_feed WHERE feed = $1;

-- name: change_recipe
-- What the canonical records are made with from now on.
UPDATE harvest_feed SET recipe = $2 WHERE feed = $1;

-- name: make_all_pending
-- Rows that are pending already are written too: whoever holds one may be making the record the old way.
INSERT INTO raw_pending AS pending (feed, key, version)
SELECT feed, key, version FROM raw_record WHERE feed = $1 ORDER BY key
ON CONFLICT (feed, key) DO UPDATE SET version = greatest(pending.version, excluded.version);
