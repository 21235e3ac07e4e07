-- name: claim
-- Claim the oldest due rows; with SKIP LOCKED concurrent claims do not wait for each other.
WITH due AS MATERIALIZED (
    SELECT t.ctid AS position
    FROM <table> t
    WHERE t.<state> = <ready> AND t.due_at <= $3 AND (<condition>)
    ORDER BY t.due_at, t.id
    LIMIT <limit>
    FOR UPDATE SKIP LOCKED
), entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), claimed AS (
    -- The rows are locked above, so the ctid finds them; a row that changed before its lock is left to the next claim.
    UPDATE <table> t
    SET <state> = <claimed>,
        fence = t.fence + 1,
        <attempts> = t.<attempts> + 1,
        worker = $1,
        lease_until = $2,
        moves = <moves><stamp>
    WHERE t.ctid = ANY (ARRAY(SELECT position FROM due))
    RETURNING t.*
), logged AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), <machine>, $3, array_agg(<subject>),
           ARRAY[<ready>], ARRAY[<claimed>], ARRAY[$1], ARRAY[NULL::text], array_agg(t.fence)
    FROM claimed t
    HAVING count(*) > 0
)
SELECT * FROM claimed ORDER BY due_at, id;

-- name: heartbeat
-- Extend the lease of rows that still have the reported fence; a heartbeat never shortens a lease.
UPDATE <table> t
SET lease_until = greatest(t.lease_until, $1)
FROM <reported_keys>
WHERE <is_reported> AND t.fence = reported.fence AND t.<state> = <claimed>
RETURNING <keys>, t.fence;

-- name: settle
-- Move the rows that still have the reported fence, found by their key.
WITH entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), moved AS (
    UPDATE <table> t
    SET <state> = <reached>,
        lease_until = NULL,
        due_at = CASE WHEN <reached> = <ready> THEN coalesce($4, t.due_at) ELSE least(t.due_at, $1) END,
        <attempts> = t.<attempts> - CASE WHEN $5 THEN 0 ELSE 1 END,
        moves = <moves><stamp>
    FROM <reported_settled>
    WHERE <is_reported> AND t.fence = reported.fence AND t.<state> = <claimed>
    RETURNING t.*
), logged AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), <machine>, $1, <steps>, ARRAY[$3], array_agg(t.fence ORDER BY t.id, step.n)
    FROM moved t
    JOIN <paths> ON step.reached = t.<state>
    HAVING count(*) > 0
)
SELECT <keys>, t.fence, t.<state> AS state FROM moved t;

-- name: settled_before
-- The rows of reports that moved nothing, if they already are where the report would move them: a repeated report.
SELECT <keys>, t.fence, t.<state> AS state
FROM <reported_before>
JOIN <table> t ON <is_reported> AND t.fence = reported.fence
WHERE t.<state> = <reached_before>;

-- name: reap
-- Take back rows with an expired lease; the incremented fence supersedes a late report.
WITH late AS MATERIALIZED (
    SELECT t.ctid AS position
    FROM <table> t
    WHERE t.<state> = <claimed> AND t.lease_until < $1
    ORDER BY t.lease_until
    LIMIT $2
    FOR UPDATE SKIP LOCKED
), entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), moved AS (
    UPDATE <table> t
    SET <state> = CASE WHEN t.<attempts> >= <max_attempts> THEN <failed> ELSE <ready> END,
        fence = t.fence + 1,
        lease_until = NULL,
        due_at = $1,
        moves = <moves><stamp>
    WHERE t.ctid = ANY (ARRAY(SELECT position FROM late))
    RETURNING t.*
), logged AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), <machine>, $1, <steps>,
           array_agg('the lease of ' || coalesce(t.worker, 'an unnamed worker') || ' expired, attempt ' || t.<attempts>
                     ORDER BY t.id, step.n),
           array_agg(t.fence ORDER BY t.id, step.n)
    FROM moved t
    JOIN <paths> ON step.reached = t.<state>
    HAVING count(*) > 0
)
SELECT <keys>, t.<state> AS status FROM moved t;

-- name: steps
-- Part of other statements: subjects, sources, targets and actors of moved rows; equal values are stored once.
array_agg(<subject> ORDER BY t.id, step.n),
CASE WHEN min(step.source) = max(step.source) THEN ARRAY[min(step.source)]
     ELSE array_agg(step.source ORDER BY t.id, step.n) END,
CASE WHEN min(step.target) = max(step.target) THEN ARRAY[min(step.target)]
     ELSE array_agg(step.target ORDER BY t.id, step.n) END,
CASE WHEN min(<actor>) = max(<actor>) THEN ARRAY[min(<actor>)]
     ELSE array_agg(<actor> ORDER BY t.id, step.n) END
