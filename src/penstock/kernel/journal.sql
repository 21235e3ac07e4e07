-- name: append
-- Keep a batch of moves; one statement however many.
INSERT INTO journal (machine, subject, source, target, actor, at, reason, fence)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::timestamptz[], $7::text[], $8::bigint[]);

-- name: history
-- The moves of some subjects, oldest first.
SELECT tx::text, id, machine, subject, source, target, actor, at, reason, fence
FROM journal
WHERE machine = ANY ($1) AND subject = ANY ($2) AND id > $3
ORDER BY id
LIMIT $4;

-- name: tail
-- What followed a position. Ids do not commit in order, so only transactions below the oldest running one count.
SELECT j.tx::text, j.id, j.machine, j.subject, j.source, j.target, j.actor, j.at, j.reason, j.fence
FROM journal j
WHERE (j.tx, j.id) > ($1::text::xid8, $2) AND j.tx < pg_snapshot_xmin(pg_current_snapshot())
ORDER BY j.tx, j.id  -- the columns, not the text they are shown as
LIMIT $3;

-- name: end
-- The oldest transaction that may still write: everything before it is already told.
SELECT pg_snapshot_xmin(pg_current_snapshot())::text;

-- name: prune
-- Forget some old entries, whichever are found first.
WITH old AS (
    SELECT ctid FROM journal WHERE at < $1 LIMIT $2
), gone AS (
    DELETE FROM journal WHERE ctid IN (SELECT ctid FROM old) RETURNING 1
)
SELECT count(*) FROM gone;
