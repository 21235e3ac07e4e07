-- name: lock_file
-- Serialize registrations and whole-file moves of one file; a row that does not exist yet cannot be locked.
SELECT pg_advisory_xact_lock(hashtextextended('penstock.tracking.' || $1, 0));

-- name: insert_rows
-- Insert one row per new shard of a file, with the event-ingest status of the file.
WITH entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), inserted AS (
    INSERT INTO pipeline_tracking
        (filename, shard, <status>, <attempts>, worker, lease_until, created_at, updated_at, due_at, moves)
    SELECT $1, shard, $3, ($3 = {stage.STARTED})::int, $4, CASE WHEN $3 = {stage.STARTED} THEN timestamptz 'infinity' END,
           $6, $6, $6, ARRAY[(SELECT number FROM entry)]
    FROM unnest($2::integer[]) WITH ORDINALITY AS requested (shard, n)
    ORDER BY n
    RETURNING id, filename, shard
)
INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
SELECT (SELECT number FROM entry), <machine>, $6, array_agg(filename || '/' || shard ORDER BY id),
       ARRAY[NULL::text], ARRAY[$3], ARRAY[$5], ARRAY[NULL::text], ARRAY[NULL::bigint]
FROM inserted;

-- name: find_file
-- Select all rows of one file.
SELECT * FROM pipeline_tracking WHERE filename = $1 ORDER BY shard;

-- name: find_row
-- Select one row.
SELECT * FROM pipeline_tracking WHERE filename = $1 AND shard = $2;

-- name: find_statuses
-- Select the status of reported rows, each by its key.
SELECT t.filename, t.shard, t.<status> AS status
FROM unnest($1::text[], $2::integer[]) AS reported (filename, shard)
CROSS JOIN LATERAL (
    SELECT * FROM pipeline_tracking t WHERE t.filename = reported.filename AND t.shard = reported.shard
) AS t;

-- name: find_claims
-- Select the rows of this stage that a worker has claimed with a lease.
SELECT filename, shard, fence FROM pipeline_tracking
WHERE worker = $1 AND lease_until < 'infinity' AND <status> = {stage.STARTED};

-- name: move
-- Move one row, or all rows of a file, if each of them may move or has the target status already.
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
        -- A later stage can fail while this one is started; the lease stays.
        lease_until = CASE
            WHEN $3 = {stage.STARTED} THEN timestamptz 'infinity'
            WHEN found.<status> <> {stage.STARTED} THEN t.lease_until
        END,
        due_at = least(t.due_at, $8),  -- a manual move makes the row due at once
        updated_at = $8,
        moves = <moves>
    FROM found
    WHERE t.filename = found.filename AND t.shard = found.shard AND found.may_move
      AND NOT EXISTS (SELECT FROM found WHERE NOT may_move AND NOT has_moved)
    RETURNING t.id, t.filename, t.shard, found.<status> AS source, t.fence
), logged AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), <machine>, $8, array_agg(filename || '/' || shard ORDER BY id),
           array_agg(source ORDER BY id), ARRAY[$3], ARRAY[$6], ARRAY[$7], array_agg(fence ORDER BY id)
    FROM moved
    HAVING count(*) > 0
)
SELECT found.*, moved.id IS NOT NULL AS moved FROM found LEFT JOIN moved ON moved.id = found.id;

-- name: list_queue
-- Select the rows that wait for a stage, in the order of claims.
SELECT t.id, t.filename, t.shard, t.created_at, t.due_at
FROM pipeline_tracking t
WHERE t.<status> = {stage.NEW} AND (<may_start>)
  AND (t.due_at, t.id) > ($1, $2::bigint)
  AND ($3::timestamptz IS NULL OR t.updated_at >= $3)
  AND ($4::timestamptz IS NULL OR t.updated_at < $4)
ORDER BY t.due_at, t.id
LIMIT $5 OFFSET $6;

-- name: count_ahead
-- Count the rows ahead of a row in its queue, up to a limit.
SELECT count(*)
FROM (
    SELECT FROM pipeline_tracking t
    WHERE t.<status> = {stage.NEW} AND (<may_start>) AND (t.due_at, t.id) < ($1, $2::bigint)
    LIMIT $3
) AS ahead;

-- name: list_overdue
-- Count started rows that should have ended: leases that expired before $1, and starts without a lease before $2.
SELECT
    t.lease_until < 'infinity' AS has_lease,
    count(*) AS rows,
    min(CASE WHEN t.lease_until < 'infinity' THEN t.lease_until ELSE t.updated_at END) AS since
FROM pipeline_tracking t
WHERE t.<status> = {stage.STARTED}
  AND (t.lease_until < $1 OR t.lease_until = 'infinity' AND t.updated_at < $2)
GROUP BY 1;

-- name: find_complete
-- Select those of the given files whose shards are all done in this stage, with the number of shards.
SELECT filename, (SELECT count(*) FROM pipeline_tracking t WHERE t.filename = given.filename) AS shards
FROM unnest($1::text[]) AS given (filename)
-- Shards are claimed in their order: of an incomplete file the last one is rarely done, and the others need not be read.
WHERE (
    SELECT t.<status> FROM pipeline_tracking t WHERE t.filename = given.filename ORDER BY t.shard DESC LIMIT 1
) = {stage.DONE}
AND NOT EXISTS (
    SELECT FROM pipeline_tracking t WHERE t.filename = given.filename AND t.<status> <> {stage.DONE}
)
ORDER BY filename;

-- name: find_oldest
-- Find when the oldest row in the queue was registered; a retried row has a later position, so it may not be the first.
SELECT min(created_at)
FROM (
    SELECT t.created_at FROM pipeline_tracking t
    WHERE t.<status> = {stage.NEW} AND (<may_start>)
    ORDER BY t.due_at, t.id
    LIMIT $1
) AS first;

-- name: list_rows
-- Select the rows that match a filter, by file and shard, within a range of filenames.
SELECT *
FROM pipeline_tracking t
WHERE (<filter>)
  AND (t.filename, t.shard) > ($1, $2::bigint) AND t.filename >= $3 AND t.filename < $4
  AND ($5::integer IS NULL OR t.shard = $5)
  AND ($6::timestamptz IS NULL OR t.updated_at >= $6)
  AND ($7::timestamptz IS NULL OR t.updated_at < $7)
ORDER BY t.filename, t.shard
LIMIT $8;

-- name: find_failed_files
-- Select the files with matching failures, for a stage that moves whole files.
SELECT t.filename
FROM pipeline_tracking t
WHERE <failed>
GROUP BY t.filename
ORDER BY t.filename
LIMIT $7;

-- name: retry_rows
-- Reset failed rows to new, with all attempts available again.
WITH chosen AS MATERIALIZED (
    SELECT t.ctid AS position FROM pipeline_tracking t WHERE <failed>
    ORDER BY t.filename, t.shard
    LIMIT $7
    FOR UPDATE SKIP LOCKED
), entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), moved AS (
    UPDATE pipeline_tracking t
    SET <status> = {stage.NEW}, <attempts> = 0, due_at = least(t.due_at, $8), updated_at = $8, moves = <moves>
    WHERE t.ctid = ANY (ARRAY(SELECT position FROM chosen))
    RETURNING t.id, t.filename, t.shard, t.fence
), logged AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), <machine>, $8, array_agg(filename || '/' || shard ORDER BY id),
           ARRAY[{stage.FAILED}], ARRAY[{stage.NEW}], ARRAY[$9], ARRAY[$10], array_agg(fence ORDER BY id)
    FROM moved
    HAVING count(*) > 0
)
SELECT count(*) FROM moved;

-- name: find_last_failure
-- Select time and reason of the last failure of a row.
SELECT at, reason FROM journal_move
WHERE id = ANY ($2) AND subject = $1 AND machine = <machine> AND target = {stage.FAILED}
ORDER BY id DESC, n DESC
LIMIT 1;

-- name: count_rows
-- Count the rows by stage, status and shard: the folded counts plus the changes since.
SELECT stage, state, shard, sum(rows)::bigint AS rows
FROM (
    SELECT stage, state, shard, rows FROM pipeline_count
    UNION ALL
    SELECT stage, state, shard, rows FROM pipeline_count_change
) AS counted
GROUP BY 1, 2, 3
HAVING sum(rows) <> 0;

-- name: fold_counts
-- Fold the changes into the counts. A reader sees a change either as a change or folded, never twice.
WITH folded AS (
    DELETE FROM pipeline_count_change RETURNING stage, state, shard, rows
), summed AS (
    INSERT INTO pipeline_count AS c (stage, state, shard, rows)
    SELECT stage, state, shard, sum(rows) FROM folded GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
    ON CONFLICT (stage, state, shard) DO UPDATE SET rows = c.rows + excluded.rows
)
SELECT count(*) FROM folded;

-- name: limit_listing_time
-- Limit the time of a listing: a selective filter may scan every row, and claims need the connection.
SET LOCAL statement_timeout = '10s';

-- name: list_pauses
-- Select the paused stages.
SELECT stage, since, actor, reason FROM pipeline_pause;

-- name: pause
-- Pause a stage; an existing pause is left unchanged.
INSERT INTO pipeline_pause (stage, since, actor, reason) VALUES ($1, $2, $3, $4) ON CONFLICT (stage) DO NOTHING;

-- name: resume
-- End the pause of a stage.
DELETE FROM pipeline_pause WHERE stage = $1;
