-- name: open_updates
-- Store updates as pending, and the hash of the command if it was unknown; return whether each is new.
INSERT INTO update_request AS u (tenant_id, event_id, dict_code, status, body_hash, created_at, updated_at)
SELECT tenant_id, event_id, dict_code, {update.PENDING}, body_hash, $5, $5
FROM unnest($1::text[], $2::uuid[], $3::text[], $4::bytea[]) AS given (tenant_id, event_id, dict_code, body_hash)
ORDER BY tenant_id, event_id
ON CONFLICT (tenant_id, event_id) DO UPDATE SET body_hash = excluded.body_hash WHERE u.body_hash IS NULL
RETURNING u.tenant_id, u.event_id, u.xmax = 0 AS is_new;

-- name: find_updates
-- The stored updates of some events.
SELECT u.tenant_id, u.event_id, u.dict_code, u.status, u.committed_version, u.error_code, u.error_message, u.created_at,
       u.updated_at, u.body_hash
FROM unnest($1::text[], $2::uuid[]) AS given (tenant_id, event_id)
JOIN update_request u ON u.tenant_id = given.tenant_id AND u.event_id = given.event_id;

-- name: list_failed_updates
-- The failed updates of a tenant before a time and id, latest first.
SELECT tenant_id, event_id, dict_code, status, committed_version, error_code, error_message, created_at, updated_at
FROM update_request
WHERE status = {update.FAILED} AND tenant_id = $1 AND ($2::text IS NULL OR dict_code = $2)
  AND (updated_at, event_id) < ($3::timestamptz, $4::uuid)
ORDER BY updated_at DESC, event_id DESC
LIMIT $5;

-- name: list_pending_updates
-- The pending updates of a tenant before a time and id, latest first.
SELECT tenant_id, event_id, dict_code, status, committed_version, error_code, error_message, created_at, updated_at
FROM update_request
WHERE status = {update.PENDING} AND tenant_id = $1 AND ($2::text IS NULL OR dict_code = $2)
  AND (created_at, event_id) < ($3::timestamptz, $4::uuid)
ORDER BY created_at DESC, event_id DESC
LIMIT $5;

-- name: lock_dictionaries
-- Lock dictionaries, always in the same order, and return their heads.
SELECT m.tenant_id, m.dict_code, m.version, m.last_source_revision
FROM dictionary_meta m
JOIN unnest($1::text[], $2::text[]) AS given (tenant_id, dict_code)
    ON m.tenant_id = given.tenant_id AND m.dict_code = given.dict_code
ORDER BY m.tenant_id, m.dict_code
FOR UPDATE OF m;

-- name: create_dictionaries
-- Insert the missing dictionaries at version 0.
INSERT INTO dictionary_meta (tenant_id, dict_code, version, updated_at)
SELECT tenant_id, dict_code, 0, $3
FROM unnest($1::text[], $2::text[]) AS new (tenant_id, dict_code)
ORDER BY tenant_id, dict_code
ON CONFLICT DO NOTHING;

-- name: mark_processed
-- Mark events as processed; return those that were not processed before.
INSERT INTO processed_event (tenant_id, event_id, source, processed_at)
SELECT tenant_id, event_id, source, $4
FROM unnest($1::text[], $2::uuid[], $3::text[]) AS event (tenant_id, event_id, source)
ORDER BY tenant_id, event_id
ON CONFLICT DO NOTHING
RETURNING tenant_id, event_id;

-- name: advance_heads
-- Store the new versions of dictionaries.
UPDATE dictionary_meta m
SET version = head.version, last_source_revision = head.revision, updated_at = $5
FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[]) AS head (tenant_id, dict_code, version, revision)
WHERE m.tenant_id = head.tenant_id AND m.dict_code = head.dict_code;

-- name: finish_updates
-- Store the results of updates, also of commands that were sent directly to the bus; final results do not change.
-- Return the events whose updates are final now.
WITH result AS MATERIALIZED (
    SELECT *
    FROM unnest($1::text[], $2::uuid[], $3::text[], $4::text[], $5::bigint[], $6::text[], $7::text[])
        AS result (tenant_id, event_id, dict_code, status, committed_version, error_code, error_message)
), finished AS (
    INSERT INTO update_request AS u
        (tenant_id, event_id, dict_code, status, committed_version, error_code, error_message, created_at, updated_at)
    SELECT tenant_id, event_id, dict_code, status, committed_version, error_code, error_message, $8, $8
    FROM result
    ORDER BY tenant_id, event_id
    ON CONFLICT (tenant_id, event_id) DO UPDATE SET
        status = excluded.status,
        committed_version = excluded.committed_version,
        error_code = excluded.error_code,
        error_message = excluded.error_message,
        updated_at = excluded.updated_at
    WHERE u.status = {update.PENDING}
    RETURNING u.tenant_id, u.event_id, u.dict_code, u.status, u.error_code
), noted AS (
    INSERT INTO journal (machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT 'refdata.update', $8, array_agg(concat_ws('/', tenant_id, dict_code, event_id)), ARRAY[{update.PENDING}],
           array_agg(status), ARRAY[$9::text], array_agg(error_code), ARRAY[NULL::bigint]
    FROM finished
    WHERE status <> {update.PENDING}
    HAVING count(*) > 0
)
SELECT tenant_id, event_id FROM finished WHERE status <> {update.PENDING};

-- name: append_outbox
-- Store commits for the relay, in the order of versions.
INSERT INTO outbox_event
    (tenant_id, event_id, dict_code, version, payload, event_type, source, items, source_revision, created_at)
SELECT tenant_id, event_id, dict_code, version, payload::jsonb, event_type, source, items, source_revision, $10
-- Bind the payloads as text: a connection that encodes JSON itself would encode them a second time.
FROM unnest($1::text[], $2::uuid[], $3::text[], $4::bigint[], $5::text[], $6::text[], $7::text[], $8::integer[],
            $9::bigint[]) WITH ORDINALITY
    AS commits (tenant_id, event_id, dict_code, version, payload, event_type, source, items, source_revision, n)
ORDER BY n;

-- name: notify_commit
-- Wake the relay and the waiting writers at the commit.
SELECT pg_notify($1, '');

-- name: read_committed_version
-- The last version of a dictionary.
SELECT coalesce((SELECT version FROM dictionary_meta WHERE tenant_id = $1 AND dict_code = $2), 0);

-- name: read_stamp
-- The last version of a dictionary, the hash of its loadSql, and the pinned version.
SELECT m.version, m.updated_at, (SELECT load_hash FROM dictionary_definition WHERE dict_code = $2) AS load_hash,
       p.version AS pinned, p.pinned_at
FROM dictionary_meta m
LEFT JOIN dictionary_pin p ON p.tenant_id = m.tenant_id AND p.dict_code = m.dict_code
WHERE m.tenant_id = $1 AND m.dict_code = $2;

-- name: read_stamps
-- The last version of all dictionaries of some codes, and the pinned one.
SELECT m.tenant_id, m.dict_code, m.version, m.updated_at, p.version AS pinned, p.pinned_at
FROM dictionary_meta m
LEFT JOIN dictionary_pin p ON p.tenant_id = m.tenant_id AND p.dict_code = m.dict_code
WHERE m.dict_code = ANY ($1::text[]);

-- name: list_commits
-- The commits of a dictionary from a version on, with the changed keys if they are few.
SELECT version, event_id, source, created_at, payload -> 'keys' AS keys, payload ->> 'traceparent' AS trace
FROM outbox_event
WHERE tenant_id = $1 AND dict_code = $2 AND version >= $3::bigint
ORDER BY version
LIMIT $4;

-- name: list_versions
-- The versions of a dictionary below a version, latest first.
SELECT version, event_id, event_type, source, source_revision, items, payload -> 'keys' AS keys, created_at
FROM outbox_event
WHERE tenant_id = $1 AND dict_code = $2 AND version < $3::bigint
ORDER BY version DESC
LIMIT $4;

-- name: list_dictionaries
-- The dictionaries of a tenant that have a version, and their pins.
SELECT m.dict_code, m.version, m.updated_at, p.version AS pinned
FROM dictionary_meta m
LEFT JOIN dictionary_pin p ON p.tenant_id = m.tenant_id AND p.dict_code = m.dict_code
WHERE m.tenant_id = $1;

-- name: upsert_items
-- Insert or replace items of a dictionary without tables of its own.
INSERT INTO dictionary_item AS i (tenant_id, dict_code, item_key, payload, updated_at)
SELECT tenant_id, $1, item_key, payload, $5
FROM unnest($2::text[], $3::text[], $4::jsonb[]) AS given (tenant_id, item_key, payload)
ON CONFLICT (tenant_id, dict_code, item_key) DO UPDATE
SET payload = excluded.payload, deleted = false, updated_at = excluded.updated_at;

-- name: delete_items
-- Mark items as deleted.
UPDATE dictionary_item i
SET deleted = true, updated_at = $4
FROM unnest($2::text[], $3::text[]) AS given (tenant_id, item_key)
WHERE i.tenant_id = given.tenant_id AND i.dict_code = $1 AND i.item_key = given.item_key AND NOT i.deleted;

-- name: create_incoming
-- A temporary table for the items of a snapshot, dropped at the end of the transaction.
CREATE TEMP TABLE incoming_item (item_key text NOT NULL, payload jsonb NOT NULL) ON COMMIT DROP;

-- name: analyze_incoming
-- Give the planner the number of items.
ANALYZE incoming_item;

-- name: change_items
-- Update the items that differ; equal ones are not written.
UPDATE dictionary_item i
SET payload = incoming.payload, deleted = false, updated_at = $3
FROM incoming_item incoming
WHERE i.tenant_id = $1 AND i.dict_code = $2 AND i.item_key = incoming.item_key
  AND (i.deleted OR i.payload IS DISTINCT FROM incoming.payload);

-- name: add_items
-- Insert the new items.
INSERT INTO dictionary_item (tenant_id, dict_code, item_key, payload, updated_at)
SELECT $1, $2, incoming.item_key, incoming.payload, $3
FROM incoming_item incoming
WHERE NOT EXISTS (
    SELECT FROM dictionary_item i WHERE i.tenant_id = $1 AND i.dict_code = $2 AND i.item_key = incoming.item_key
)
ORDER BY incoming.item_key;

-- name: remove_items
-- Mark the items that the snapshot does not contain as deleted.
UPDATE dictionary_item i
SET deleted = true, updated_at = $3
WHERE i.tenant_id = $1 AND i.dict_code = $2 AND NOT i.deleted
  AND NOT EXISTS (SELECT FROM incoming_item incoming WHERE incoming.item_key = i.item_key);

-- name: open_set
-- Insert the set of a snapshot unless it exists.
INSERT INTO snapshot_set (tenant_id, dict_code, snapshot_id, status, chunks_total, source_revision, created_at, updated_at)
VALUES ($1, $2, $3, {snapshot.OPEN}, $4, $5, $6, $6)
ON CONFLICT (tenant_id, dict_code, snapshot_id) DO NOTHING;

-- name: get_set
-- The set of a snapshot, locked.
SELECT status, chunks_total, source_revision, committed_version, error_code, error_message
FROM snapshot_set
WHERE tenant_id = $1 AND dict_code = $2 AND snapshot_id = $3
FOR UPDATE;

-- name: stage_chunk
-- Store a chunk; return a row unless that chunk is stored already.
INSERT INTO snapshot_chunk (tenant_id, dict_code, snapshot_id, chunk_index, item_count, content_hash, items)
VALUES ($1, $2, $3, $4, $5, $6, $7)
ON CONFLICT DO NOTHING
RETURNING true;

-- name: read_chunk_hash
-- The hash of the content of a stored chunk.
SELECT content_hash FROM snapshot_chunk
WHERE tenant_id = $1 AND dict_code = $2 AND snapshot_id = $3 AND chunk_index = $4;

-- name: join_set
-- Add an event to a snapshot, and return the number of its chunks and items.
WITH joined AS (
    INSERT INTO snapshot_event (tenant_id, dict_code, snapshot_id, event_id) VALUES ($1, $2, $3, $4)
    ON CONFLICT DO NOTHING
), touched AS (
    UPDATE snapshot_set SET updated_at = $5 WHERE tenant_id = $1 AND dict_code = $2 AND snapshot_id = $3
)
SELECT count(*), coalesce(sum(item_count), 0)::bigint
FROM snapshot_chunk
WHERE tenant_id = $1 AND dict_code = $2 AND snapshot_id = $3;

-- name: read_chunks
-- The chunks of a snapshot, in order.
SELECT items FROM snapshot_chunk
WHERE tenant_id = $1 AND dict_code = $2 AND snapshot_id = $3
ORDER BY chunk_index;

-- name: list_chunk_indexes
-- The indexes of the stored chunks of a snapshot.
SELECT chunk_index FROM snapshot_chunk WHERE tenant_id = $1 AND dict_code = $2 AND snapshot_id = $3;

-- name: list_set_events
-- The events of a snapshot, with their sources.
SELECT s.event_id, p.source
FROM snapshot_event s
JOIN processed_event p ON p.tenant_id = s.tenant_id AND p.event_id = s.event_id
WHERE s.tenant_id = $1 AND s.dict_code = $2 AND s.snapshot_id = $3;

-- name: close_set
-- End an open snapshot as committed or failed, and delete its content.
WITH closed AS (
    UPDATE snapshot_set
    SET status = $4, committed_version = $5, error_code = $6, error_message = $7, updated_at = $8
    WHERE tenant_id = $1 AND dict_code = $2 AND snapshot_id = $3 AND status = {snapshot.OPEN}
    RETURNING tenant_id, dict_code, snapshot_id, status, error_code
), emptied AS (
    UPDATE snapshot_chunk SET items = NULL
    WHERE tenant_id = $1 AND dict_code = $2 AND snapshot_id = $3 AND EXISTS (SELECT FROM closed)
)
INSERT INTO journal (machine, at, subjects, sources, targets, actors, reasons, fences)
SELECT 'refdata.snapshot', $8, ARRAY[concat_ws('/', tenant_id, dict_code, snapshot_id)], ARRAY[{snapshot.OPEN}],
       ARRAY[status], ARRAY[$9::text], ARRAY[error_code], ARRAY[NULL::bigint]
FROM closed;

-- name: list_expired_sets
-- Open snapshots without a new chunk since a time, oldest first.
SELECT tenant_id, dict_code, snapshot_id, chunks_total
FROM snapshot_set
WHERE status = {snapshot.OPEN} AND updated_at < $1
ORDER BY updated_at
LIMIT $2;

-- name: is_expired
-- Whether a snapshot is open and has had no new chunk since a time.
SELECT EXISTS (
    SELECT FROM snapshot_set
    WHERE tenant_id = $1 AND dict_code = $2 AND snapshot_id = $3 AND status = {snapshot.OPEN} AND updated_at < $4
);

-- name: claim_late_updates
-- Pending updates that are too old and were not probed recently; set the time of the probe.
UPDATE update_request u
SET probed_at = $3
FROM (
    SELECT tenant_id, event_id
    FROM update_request
    WHERE status = {update.PENDING} AND created_at < $1 AND coalesce(probed_at, '-infinity') < $2
    ORDER BY created_at
    LIMIT $4
    FOR UPDATE SKIP LOCKED
) AS late
WHERE u.tenant_id = late.tenant_id AND u.event_id = late.event_id
RETURNING u.tenant_id, u.event_id, u.dict_code;

-- name: read_definitions
-- The hash of the last loadSql of each dictionary code.
SELECT dict_code, load_hash FROM dictionary_definition;

-- name: store_definition
-- Store the hash of the loadSql of a dictionary code.
INSERT INTO dictionary_definition (dict_code, load_hash, updated_at) VALUES ($1, $2, $3)
ON CONFLICT (dict_code) DO UPDATE SET load_hash = excluded.load_hash, updated_at = excluded.updated_at;

-- name: lock_codes
-- Lock all dictionaries of some codes, in the order of lock_dictionaries, and return their heads.
SELECT tenant_id, dict_code, version, last_source_revision
FROM dictionary_meta
WHERE dict_code = ANY ($1::text[])
ORDER BY tenant_id, dict_code
FOR UPDATE;

-- name: list_targets
-- The tenants of a dictionary code.
SELECT tenant_id FROM dictionary_meta WHERE dict_code = $1 ORDER BY tenant_id;

-- name: prune_processed
-- Delete old processed events.
DELETE FROM processed_event WHERE ctid = ANY (ARRAY(SELECT ctid FROM processed_event WHERE processed_at < $1 LIMIT $2));

-- name: prune_tombstones
-- Delete the rows of items that were deleted long ago.
DELETE FROM dictionary_item
WHERE ctid = ANY (ARRAY(SELECT ctid FROM dictionary_item WHERE deleted AND updated_at < $1 LIMIT $2))
  AND deleted AND updated_at < $1;  -- it may have been inserted again meanwhile

-- name: prune_updates
-- Delete old updates by the time of their end, so that none is deleted before its processed event.
DELETE FROM update_request
WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM update_request WHERE updated_at < $1 AND status <> {update.PENDING} LIMIT $2
));

-- name: prune_sets
-- Delete old snapshots with their chunks and events.
WITH old AS MATERIALIZED (
    SELECT tenant_id, dict_code, snapshot_id FROM snapshot_set
    WHERE status <> {snapshot.OPEN} AND updated_at < $1
    LIMIT $2
), events AS (
    DELETE FROM snapshot_event e USING old
    WHERE e.tenant_id = old.tenant_id AND e.dict_code = old.dict_code AND e.snapshot_id = old.snapshot_id
), chunks AS (
    DELETE FROM snapshot_chunk c USING old
    WHERE c.tenant_id = old.tenant_id AND c.dict_code = old.dict_code AND c.snapshot_id = old.snapshot_id
)
DELETE FROM snapshot_set s USING old
WHERE s.tenant_id = old.tenant_id AND s.dict_code = old.dict_code AND s.snapshot_id = old.snapshot_id;

-- name: find_oldest_pending
-- The creation time of the oldest pending update.
SELECT min(created_at) FROM update_request WHERE status = {update.PENDING};

-- name: count_updates
-- The number of dictionaries, tenants and pending updates, and the oldest pending update and unannounced version.
SELECT
    count(*) AS dictionaries, count(DISTINCT tenant_id) AS tenants,
    (SELECT count(*) FROM update_request WHERE status = {update.PENDING}) AS pending,
    (SELECT min(created_at) FROM update_request WHERE status = {update.PENDING}) AS pending_since,
    (SELECT created_at FROM outbox_event WHERE NOT published ORDER BY id LIMIT 1) AS unannounced_since
FROM dictionary_meta WHERE version > 0;

-- name: list_failing
-- The dictionaries with updates that failed since a time, latest first; the LIMIT bounds the cost.
SELECT tenant_id, dict_code, count(*) AS failed, max(updated_at) AS last_at,
       (array_agg(coalesce(error_code, 'FAILED') ORDER BY updated_at DESC))[1] AS code
FROM (
    SELECT tenant_id, dict_code, updated_at, error_code FROM update_request
    WHERE status = {update.FAILED} AND updated_at > $1
    LIMIT 10000
) AS failed
GROUP BY 1, 2
ORDER BY last_at DESC
LIMIT $2;

-- name: insert_retained
-- Store that a version is retained; return a row unless it was retained before.
INSERT INTO retained_version (tenant_id, dict_code, version, items, retained_at) VALUES ($1, $2, $3, 0, $4)
ON CONFLICT DO NOTHING
RETURNING true;

-- name: set_retained_items
-- Store the number of items of a retained version.
UPDATE retained_version SET items = $4 WHERE tenant_id = $1 AND dict_code = $2 AND version = $3;

-- name: list_retained
-- The retained versions of a dictionary, latest first.
SELECT k.version, k.items, k.retained_at, p.version IS NOT NULL AS is_pinned
FROM retained_version k
LEFT JOIN dictionary_pin p ON p.tenant_id = k.tenant_id AND p.dict_code = k.dict_code AND p.version = k.version
WHERE k.tenant_id = $1 AND k.dict_code = $2 AND NOT k.is_dropped
ORDER BY k.version DESC;

-- name: read_retained_items
-- The items of a retained version.
SELECT item_key, payload FROM retained_item WHERE tenant_id = $1 AND dict_code = $2 AND version = $3 ORDER BY item_key;

-- name: pin
-- Make readers get a retained version instead of the last one.
INSERT INTO dictionary_pin (tenant_id, dict_code, version, pinned_at)
SELECT tenant_id, dict_code, version, $4 FROM retained_version
WHERE tenant_id = $1 AND dict_code = $2 AND version = $3 AND NOT is_dropped
ON CONFLICT (tenant_id, dict_code) DO UPDATE SET version = excluded.version, pinned_at = excluded.pinned_at
RETURNING true;

-- name: unpin
-- Make readers get the last version again.
DELETE FROM dictionary_pin WHERE tenant_id = $1 AND dict_code = $2 RETURNING version;

-- name: drop_retained
-- Drop the retained versions beyond the configured number, except the pinned one.
UPDATE retained_version k SET is_dropped = true
FROM (
    SELECT tenant_id, dict_code, version,
           row_number() OVER (PARTITION BY tenant_id, dict_code ORDER BY version DESC) AS rank
    FROM retained_version
    WHERE NOT is_dropped
) AS ranked
LEFT JOIN unnest($1::text[], $2::integer[]) AS setting (dict_code, number) ON setting.dict_code = ranked.dict_code
WHERE ranked.rank > greatest(coalesce(setting.number, 0), 1)
  AND k.tenant_id = ranked.tenant_id AND k.dict_code = ranked.dict_code AND k.version = ranked.version
  AND NOT EXISTS (
      SELECT FROM dictionary_pin p
      WHERE p.tenant_id = k.tenant_id AND p.dict_code = k.dict_code AND p.version = k.version
  );

-- name: prune_retained_items
-- Delete items of dropped versions.
DELETE FROM retained_item
WHERE ctid = ANY (ARRAY(
    SELECT i.ctid
    FROM retained_version k
    JOIN retained_item i ON i.tenant_id = k.tenant_id AND i.dict_code = k.dict_code AND i.version = k.version
    WHERE k.is_dropped
    LIMIT $1
));

-- name: lock_pins
-- Block pins while versions are dropped.
LOCK TABLE dictionary_pin IN SHARE MODE;

-- name: read_visible_version
-- The last version of a dictionary, and the pinned one.
SELECT m.version, p.version AS pinned
FROM dictionary_meta m
LEFT JOIN dictionary_pin p ON p.tenant_id = m.tenant_id AND p.dict_code = m.dict_code
WHERE m.tenant_id = $1 AND m.dict_code = $2;

-- name: delete_retained
-- Delete the dropped versions without items.
DELETE FROM retained_version k
WHERE k.is_dropped AND NOT EXISTS (
    SELECT FROM retained_item i WHERE i.tenant_id = k.tenant_id AND i.dict_code = k.dict_code AND i.version = k.version
);

-- name: read_drift_check
-- The last drift check of a dictionary.
SELECT check_hash, version, value, expected, drifts, drifted_at FROM drift_check WHERE tenant_id = $1 AND dict_code = $2;

-- name: store_drift_check
-- Store a drift check unless another process has stored one after the given last one; return a row if stored.
INSERT INTO drift_check AS d (tenant_id, dict_code, check_hash, version, value, expected, drifts, drifted_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
ON CONFLICT (tenant_id, dict_code) DO UPDATE SET
    check_hash = excluded.check_hash,
    version = excluded.version,
    value = excluded.value,
    expected = excluded.expected,
    drifts = excluded.drifts,
    drifted_at = excluded.drifted_at
WHERE d.check_hash = $9 AND d.version = $10 AND d.value IS NOT DISTINCT FROM $11
RETURNING true;

-- name: list_drifts
-- The dictionaries with unresolved drift since a time, latest first.
SELECT tenant_id, dict_code, drifts, drifted_at FROM drift_check
WHERE drifts > 0 AND drifted_at > $1
ORDER BY drifted_at DESC
LIMIT $2;
