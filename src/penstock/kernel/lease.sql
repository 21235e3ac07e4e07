-- name: claim
-- Hand out the oldest due rows; SKIP LOCKED keeps claimers out of each other's way.
WITH due AS MATERIALIZED (
    SELECT t.id
    FROM <table> t
    WHERE t.<state> = <ready> AND t.due_at <= $4 AND (<condition>)
    ORDER BY t.due_at, t.id
    LIMIT $2
    FOR UPDATE SKIP LOCKED
), held AS (
    UPDATE <table> t
    SET <state> = <held>, fence = t.fence + 1, <attempts> = t.<attempts> + 1, worker = $1, lease_until = $3<stamp>
    WHERE t.id = ANY (ARRAY(SELECT id FROM due))
    RETURNING t.*
), noted AS (
    INSERT INTO journal (machine, subject, source, target, actor, at, fence)
    SELECT <machine>, <subject>, <ready>, <held>, $1, $4, t.fence FROM held t
)
SELECT * FROM held ORDER BY due_at, id;

-- name: heartbeat
-- Extend what is still held under its fence, found by its key; a heartbeat never shortens a lease.
WITH held AS MATERIALIZED (
    SELECT said.id
    FROM (SELECT * FROM unnest($1::bigint[], $2::bigint[]) AS said (id, fence) ORDER BY id) AS said
    CROSS JOIN LATERAL (
        SELECT FROM <table> t WHERE t.id = said.id AND t.fence = said.fence AND t.<state> = <held> FOR UPDATE
    ) AS t
)
UPDATE <table> t
SET lease_until = greatest(t.lease_until, $3)
WHERE t.id = ANY (ARRAY(SELECT id FROM held))
RETURNING t.id;

-- name: settle
-- Move what is still held under its fence. A repeated report finds its row where it wanted it, and is a success.
-- Rows are looked up by their key one by one: any other index is full of the entries of rows settled before.
WITH said AS (
    -- Of two reports on one row the first counts.
    SELECT DISTINCT ON (id, fence) *
    FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::timestamptz[], $6::boolean[])
        WITH ORDINALITY AS said (id, fence, target, reason, due_at, counts, n)
    ORDER BY id, fence, n
), found AS MATERIALIZED (
    SELECT
        said.id,
        said.fence,
        said.reason,
        said.due_at,
        said.counts,
        CASE WHEN said.target = <ready> AND said.counts AND t.attempts >= t.most THEN <failed> ELSE said.target END AS target,
        t.current
    FROM said
    CROSS JOIN LATERAL (
        SELECT t.<state> AS current, t.<attempts> AS attempts, <max_attempts> AS most
        FROM <table> t
        WHERE t.id = said.id AND t.fence = said.fence
        FOR UPDATE
    ) AS t
), moved AS (
    UPDATE <table> t
    SET <state> = found.target,
        lease_until = NULL,
        due_at = CASE WHEN found.target = <ready> THEN coalesce(found.due_at, t.due_at) ELSE t.due_at END,
        <attempts> = t.<attempts> - CASE WHEN found.counts THEN 0 ELSE 1 END<stamp>
    FROM found
    WHERE t.id = found.id AND t.id = ANY (ARRAY(SELECT id FROM found WHERE current = <held>))
    RETURNING t.*, found.target AS said_target, found.reason AS said_reason
), noted AS (
    INSERT INTO journal (machine, subject, source, target, actor, at, reason, fence)
    SELECT <machine>, <subject>, step.source, step.target, coalesce($7, t.worker), $8, t.said_reason, t.fence
    FROM moved t
    CROSS JOIN LATERAL (
        SELECT 1 AS n, <held> AS source, t.said_target AS target WHERE t.said_target <> <ready>
        UNION ALL
        SELECT back.n, back.source, back.target
        FROM (VALUES <way_back>) AS back (n, source, target)
        WHERE t.said_target = <ready>
    ) AS step
    ORDER BY t.id, step.n
)
SELECT id, fence, target AS state, current = <held> AS moved
FROM found
WHERE current IN (<held>, target);

-- name: reap
-- Take back rows whose lease ran out; the grown fence makes every late report an old one.
WITH late AS MATERIALIZED (
    SELECT t.id
    FROM <table> t
    WHERE t.<state> = <held> AND t.lease_until < $1
    ORDER BY t.lease_until
    LIMIT $2
    FOR UPDATE SKIP LOCKED
), moved AS (
    UPDATE <table> t
    SET <state> = CASE WHEN t.<attempts> >= <max_attempts> THEN <failed> ELSE <ready> END,
        fence = t.fence + 1,
        lease_until = NULL,
        due_at = $1<stamp>
    WHERE t.id = ANY (ARRAY(SELECT id FROM late))
    RETURNING t.*
), noted AS (
    INSERT INTO journal (machine, subject, source, target, actor, at, reason, fence)
    SELECT <machine>, <subject>, step.source, step.target, $3, $1,
           'the lease of ' || coalesce(t.worker, 'an unnamed worker') || ' ran out, attempt ' || t.<attempts>, t.fence
    FROM moved t
    CROSS JOIN LATERAL (
        SELECT 1 AS n, <held> AS source, <failed> AS target WHERE t.<state> = <failed>
        UNION ALL
        SELECT back.n, back.source, back.target
        FROM (VALUES <way_back>) AS back (n, source, target)
        WHERE t.<state> = <ready>
    ) AS step
    ORDER BY t.id, step.n
)
SELECT id, <state> AS status FROM moved;
