-- name: append
-- Keep a batch of moves; one statement however many.
INSERT INTO journal (machine, subject, source, target, actor, at, reason, fence)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::timestamptz[], $7::text[], $8::bigint[]);

-- name: history
-- The moves of one subject, oldest first.
SELECT tx::text, id, machine, subject, source, target, actor, at, reason, fence
FROM journal
WHERE machine = $1 AND subject = $2 AND id > $3
ORDER BY id
LIMIT $4;

-- name: tail
-- What followed a position. Ids do not commit in order, so only transactions below the oldest running one count.
SELECT tx::text, id, machine, subject, source, target, actor, at, reason, fence
FROM journal
WHERE (tx, id) > ($1::text::xid8, $2) AND tx < pg_snapshot_xmin(pg_current_snapshot())
ORDER BY tx, id
LIMIT $3;

-- name: end
-- The oldest transaction that may still write: everything before it is already told.
SELECT pg_snapshot_xmin(pg_current_snapshot())::text;

-- name: prune
-- Forget the oldest entries.
WITH old AS (
    SELECT ctid FROM journal WHERE at < $1 ORDER BY at LIMIT $2
), gone AS (
    DELETE FROM journal WHERE ctid IN (SELECT ctid FROM old) RETURNING 1
)
SELECT count(*) FROM gone;
