-- name: append
-- Store a batch of moves under one number, which the row of each subject stores too.
INSERT INTO journal (machine, at, subjects, sources, targets, actors, reasons, fences)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
RETURNING id;

-- name: history
-- The moves of some subjects in the entries whose numbers they store, oldest first.
SELECT tx::text, id, n, machine, subject, source, target, actor, at, reason, fence
FROM journal_move
WHERE id = ANY ($1) AND subject = ANY ($2) AND (id, n) > ($3::bigint, $4::bigint)
ORDER BY id, n
LIMIT $5;

-- name: tail
-- The moves after a position. Numbers do not commit in order, so only transactions below the oldest running one count;
-- that transaction id was read before, and can only have grown.
SELECT m.tx::text, m.id, m.n, m.machine, m.subject, m.source, m.target, m.actor, m.at, m.reason, m.fence
FROM journal_move m
WHERE (m.tx, m.id) >= ($1::text::xid8, $2::bigint)
  AND (m.tx, m.id, m.n) > ($1::text::xid8, $2::bigint, $3::bigint)
  AND m.tx < $5::text::xid8 AND ($6::text[] IS NULL OR m.machine = ANY ($6))
ORDER BY m.tx, m.id, m.n  -- the columns, not their text
LIMIT $4;

-- name: end
-- The oldest transaction that may still write: all entries before it are visible.
SELECT pg_snapshot_xmin(pg_current_snapshot())::text;

-- name: before_last
-- The position before the last moves of subjects with a prefix, counted from the end, or before the earliest scanned move if there are fewer. Every
-- entry has at least one move, so as many entries as moves are enough.
WITH latest AS MATERIALIZED (
    SELECT id
    FROM (SELECT tx, id, machine, subjects FROM journal WHERE tx < $4::text::xid8 ORDER BY tx DESC, id DESC LIMIT $3) AS recent
    WHERE machine = ANY ($1)
      AND ($5 = '' OR EXISTS (SELECT FROM unnest(recent.subjects) AS subject WHERE starts_with(subject, $5)))
    ORDER BY tx DESC, id DESC
    LIMIT $2
), counted AS (
    SELECT m.tx, m.id, m.n, row_number() OVER (ORDER BY m.tx DESC, m.id DESC, m.n DESC) AS place
    FROM journal_move m
    WHERE m.id IN (SELECT id FROM latest) AND starts_with(m.subject, $5)
)
SELECT tx::text, id, n - 1 AS n FROM counted WHERE place <= $2 ORDER BY place DESC LIMIT 1;

-- name: prune
-- Delete some old entries, in no particular order.
WITH old AS (
    SELECT ctid FROM journal WHERE at < $1 LIMIT $2
), deleted AS (
    DELETE FROM journal WHERE ctid IN (SELECT ctid FROM old) RETURNING 1
)
SELECT count(*) FROM deleted;
