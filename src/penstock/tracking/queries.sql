-- name: lock_file
-- Let nobody else register or end this file until the transaction does: a row not yet there cannot be locked.
SELECT pg_advisory_xact_lock(hashtextextended('penstock.tracking.' || $1, 0));

-- name: insert_rows
-- One row per new shard of a file, in the state its event-ingest is in.
WITH entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), arrived AS (
    INSERT INTO pipeline_tracking
        (filename, shard, <status>, <attempts>, worker, lease_until, created_at, updated_at, due_at, moves)
    SELECT $1, shard, $3, ($3 = {stage.STARTED})::int, $4, CASE WHEN $3 = {stage.STARTED} THEN timestamptz 'infinity' END,
           $6, $6, $6, ARRAY[(SELECT number FROM entry)]
    FROM unnest($2::integer[]) WITH ORDINALITY AS said (shard, n)
    ORDER BY n
    RETURNING id, filename, shard
)
INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
SELECT (SELECT number FROM entry), <machine>, $6, array_agg(filename || '/' || shard ORDER BY id),
       ARRAY[NULL::text], ARRAY[$3], ARRAY[$5], ARRAY[NULL::text], ARRAY[NULL::bigint]
FROM arrived;

-- name: rows_of_file
-- All there is of one file.
SELECT * FROM pipeline_tracking WHERE filename = $1 ORDER BY shard;

-- name: row
-- One row.
SELECT * FROM pipeline_tracking WHERE filename = $1 AND shard = $2;

-- name: rows_by_key
-- Rows as their reports name them, looked up one by one.
SELECT t.filename, t.shard, t.<status> AS status
FROM unnest($1::text[], $2::integer[]) AS said (filename, shard)
CROSS JOIN LATERAL (
    SELECT * FROM pipeline_tracking t WHERE t.filename = said.filename AND t.shard = said.shard
) AS t;

-- name: held_by
-- What a worker holds of this stage under a lease.
SELECT filename, shard, fence FROM pipeline_tracking
WHERE worker = $1 AND lease_until < 'infinity' AND <status> = {stage.STARTED};

-- name: move
-- Move one row, or all rows of a file, if each of them may move or already has.
WITH found AS MATERIALIZED (
    SELECT
        t.*,
        t.<status> = ANY ($4::text[])
            AND ($3 <> {stage.STARTED} OR ((<may_start>) AND NOT <is_paused>))
            AND ($3 NOT IN ({stage.DONE}, {stage.FAILED}) OR t.<status> <> {stage.STARTED}
                 OR $5::text IS NULL OR t.worker IS NULL OR t.worker = $5) AS may_move,
        t.<status> = $3 AND ($3 <> {stage.STARTED} OR coalesce(t.worker = $5, false)) AS has_moved
    FROM pipeline_tracking t
    WHERE t.filename = $1 AND <of_file>
    ORDER BY t.shard
    FOR UPDATE
), entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), moved AS (
    UPDATE pipeline_tracking t
    SET <status> = $3,
        <attempts> = CASE $3 WHEN {stage.STARTED} THEN t.<attempts> + 1 WHEN {stage.NEW} THEN 0 ELSE t.<attempts> END,
        fence = t.fence + ($3 = {stage.STARTED})::int,
        worker = CASE WHEN $3 = {stage.STARTED} THEN $5 ELSE t.worker END,
        -- A later stage can fail while this one is under way: that takes nothing from its lease.
        lease_until = CASE
            WHEN $3 = {stage.STARTED} THEN timestamptz 'infinity'
            WHEN found.<status> <> {stage.STARTED} THEN t.lease_until
        END,
        due_at = least(t.due_at, $8),  -- whoever moves it by hand does not wait for a later try
        updated_at = $8,
        moves = <moves>
    FROM found
    WHERE t.filename = found.filename AND t.shard = found.shard AND found.may_move
      AND NOT EXISTS (SELECT FROM found WHERE NOT may_move AND NOT has_moved)
    RETURNING t.id, t.filename, t.shard, found.<status> AS source, t.fence
), noted AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), <machine>, $8, array_agg(filename || '/' || shard ORDER BY id),
           array_agg(source ORDER BY id), ARRAY[$3], ARRAY[$6], ARRAY[$7], array_agg(fence ORDER BY id)
    FROM moved
    HAVING count(*) > 0
)
SELECT found.*, moved.id IS NOT NULL AS moved FROM found LEFT JOIN moved ON moved.id = found.id;

-- name: list_queue
-- What waits for a stage, in the order it is handed out.
SELECT t.id, t.filename, t.shard, t.created_at, t.due_at
FROM pipeline_tracking t
WHERE t.<status> = {stage.NEW} AND (<may_start>)
  AND (t.due_at, t.id) > ($1, $2::bigint)
  AND ($3::timestamptz IS NULL OR t.updated_at >= $3)
  AND ($4::timestamptz IS NULL OR t.updated_at < $4)
ORDER BY t.due_at, t.id
LIMIT $5 OFFSET $6;

-- name: count_ahead
-- How many come before a row in its queue, as far as anybody counts.
SELECT count(*)
FROM (
    SELECT FROM pipeline_tracking t
    WHERE t.<status> = {stage.NEW} AND (<may_start>) AND (t.due_at, t.id) < ($1, $2::bigint)
    LIMIT $3
) AS ahead;

-- name: oldest
-- When the oldest row was created. It may not be the first: one that is tried again has a later place.
SELECT min(created_at)
FROM (
    SELECT t.created_at FROM pipeline_tracking t
    WHERE t.<status> = {stage.NEW} AND (<may_start>)
    ORDER BY t.due_at, t.id
    LIMIT $1
) AS first;

-- name: list_rows
-- The rows that stand so, by file and shard, within bounds of the file's name.
SELECT *
FROM pipeline_tracking t
WHERE (<stands>)
  AND (t.filename, t.shard) > ($1, $2::bigint) AND t.filename >= $3 AND t.filename < $4
  AND ($5::integer IS NULL OR t.shard = $5)
  AND ($6::timestamptz IS NULL OR t.updated_at >= $6)
  AND ($7::timestamptz IS NULL OR t.updated_at < $7)
ORDER BY t.filename, t.shard
LIMIT $8;

-- name: failed_files
-- The files whose rows failed so, for a stage that moves whole files.
SELECT t.filename
FROM pipeline_tracking t
WHERE <failed_so>
GROUP BY t.filename
ORDER BY t.filename
LIMIT $7;

-- name: retry_rows
-- Set failed rows back, with all their attempts before them.
WITH chosen AS MATERIALIZED (
    SELECT t.ctid AS place FROM pipeline_tracking t WHERE <failed_so>
    ORDER BY t.filename, t.shard
    LIMIT $7
    FOR UPDATE SKIP LOCKED
), entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), moved AS (
    UPDATE pipeline_tracking t
    SET <status> = {stage.NEW}, <attempts> = 0, due_at = least(t.due_at, $8), updated_at = $8, moves = <moves>
    WHERE t.ctid = ANY (ARRAY(SELECT place FROM chosen))
    RETURNING t.id, t.filename, t.shard, t.fence
), noted AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), <machine>, $8, array_agg(filename || '/' || shard ORDER BY id),
           ARRAY[{stage.FAILED}], ARRAY[{stage.NEW}], ARRAY[$9], ARRAY[$10], array_agg(fence ORDER BY id)
    FROM moved
    HAVING count(*) > 0
)
SELECT count(*) FROM moved;

-- name: last_failure
-- When and why a row failed last.
SELECT at, reason FROM journal_move
WHERE id = ANY ($2) AND subject = $1 AND machine = <machine> AND target = {stage.FAILED}
ORDER BY id DESC, n DESC
LIMIT 1;

-- name: counts
-- How many rows stand where: what is folded, and what is not yet.
SELECT stage, standing, shard, sum(rows)::bigint AS rows
FROM (
    SELECT stage, standing, shard, rows FROM pipeline_count
    UNION ALL
    SELECT stage, standing, shard, rows FROM pipeline_count_change
) AS counted
GROUP BY 1, 2, 3
HAVING sum(rows) <> 0;

-- name: fold_counts
-- Put the changes into the counts. Readers see a change either as such or folded, never twice.
WITH folded AS (
    DELETE FROM pipeline_count_change RETURNING stage, standing, shard, rows
), summed AS (
    INSERT INTO pipeline_count AS c (stage, standing, shard, rows)
    SELECT stage, standing, shard, sum(rows) FROM folded GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
    ON CONFLICT (stage, standing, shard) DO UPDATE SET rows = c.rows + excluded.rows
)
SELECT count(*) FROM folded;

-- name: be_quick
-- A listing that finds little may have to look at every row: it must not keep a connection from the queues for long.
SET LOCAL statement_timeout = '10s';

-- name: pauses
-- The stages that are paused.
SELECT stage, since, actor, reason FROM pipeline_pause;

-- name: pause
-- Pause a stage; one that is paused stays as it is.
INSERT INTO pipeline_pause (stage, since, actor, reason) VALUES ($1, $2, $3, $4) ON CONFLICT (stage) DO NOTHING;

-- name: resume
-- Let a stage go on.
DELETE FROM pipeline_pause WHERE stage = $1;
