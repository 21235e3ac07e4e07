-- name: claim
-- Hand out the oldest due rows; SKIP LOCKED keeps claimers out of each other's way.
WITH due AS MATERIALIZED (
    SELECT t.ctid AS place
    FROM <table> t
    WHERE t.<state> = <ready> AND t.due_at <= $3 AND (<condition>)
    ORDER BY t.due_at, t.id
    LIMIT <limit>
    FOR UPDATE SKIP LOCKED
), entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), held AS (
    -- Locked above, so found by its place; what changed between our snapshot and our lock is left to the next claim.
    UPDATE <table> t
    SET <state> = <held>,
        fence = t.fence + 1,
        <attempts> = t.<attempts> + 1,
        worker = $1,
        lease_until = $2,
        moves = <moves><stamp>
    WHERE t.ctid = ANY (ARRAY(SELECT place FROM due))
    RETURNING t.*
), noted AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), <machine>, $3, array_agg(<subject>),
           ARRAY[<ready>], ARRAY[<held>], ARRAY[$1], ARRAY[NULL::text], array_agg(t.fence)
    FROM held t
    HAVING count(*) > 0
)
SELECT * FROM held ORDER BY due_at, id;

-- name: heartbeat
-- Extend what is still held under its fence; a heartbeat never shortens a lease.
UPDATE <table> t
SET lease_until = greatest(t.lease_until, $1)
FROM <said_keys>
WHERE <is_said> AND t.fence = said.fence AND t.<state> = <held>
RETURNING <keys>, t.fence;

-- name: settle
-- Move what is still held under its fence; rows are looked up by their key, in one go with the move.
WITH entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), moved AS (
    UPDATE <table> t
    SET <state> = <reached>,
        lease_until = NULL,
        due_at = CASE WHEN <reached> = <ready> THEN coalesce($4, t.due_at) ELSE least(t.due_at, $1) END,
        <attempts> = t.<attempts> - CASE WHEN $5 THEN 0 ELSE 1 END,
        moves = <moves><stamp>
    FROM <said_settled>
    WHERE <is_said> AND t.fence = said.fence AND t.<state> = <held>
    RETURNING t.*
), noted AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), <machine>, $1, <steps>, ARRAY[$3], array_agg(t.fence ORDER BY t.id, step.n)
    FROM moved t
    JOIN <paths> ON step.reached = t.<state>
    HAVING count(*) > 0
)
SELECT <keys>, t.fence, t.<state> AS state FROM moved t;

-- name: standing
-- Where rows stand whose reports moved nothing: perhaps just there, because of the same report before.
SELECT <keys>, t.fence, t.<state> AS state
FROM <said_standing>
JOIN <table> t ON <is_said> AND t.fence = said.fence
WHERE t.<state> = <reached_before>;

-- name: reap
-- Take back rows whose lease ran out; the grown fence makes every late report an old one.
WITH late AS MATERIALIZED (
    SELECT t.ctid AS place
    FROM <table> t
    WHERE t.<state> = <held> AND t.lease_until < $1
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
    WHERE t.ctid = ANY (ARRAY(SELECT place FROM late))
    RETURNING t.*
), noted AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), <machine>, $1, <steps>,
           array_agg('the lease of ' || coalesce(t.worker, 'an unnamed worker') || ' ran out, attempt ' || t.<attempts>
                     ORDER BY t.id, step.n),
           array_agg(t.fence ORDER BY t.id, step.n)
    FROM moved t
    JOIN <paths> ON step.reached = t.<state>
    HAVING count(*) > 0
)
SELECT <keys>, t.<state> AS status FROM moved t;

-- name: steps
-- Part of the others: subjects, sources, targets and actors of moved rows. What is the same for all is told once.
array_agg(<subject> ORDER BY t.id, step.n),
CASE WHEN min(step.source) = max(step.source) THEN ARRAY[min(step.source)]
     ELSE array_agg(step.source ORDER BY t.id, step.n) END,
CASE WHEN min(step.target) = max(step.target) THEN ARRAY[min(step.target)]
     ELSE array_agg(step.target ORDER BY t.id, step.n) END,
CASE WHEN min(<actor>) = max(<actor>) THEN ARRAY[min(<actor>)]
     ELSE array_agg(<actor> ORDER BY t.id, step.n) END
