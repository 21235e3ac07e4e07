-- name: insert_run
-- Insert a run that starts.
INSERT INTO ingest_run (run_id, supplier, status, holder, started_at, moves)
VALUES ($1, $2, {run.RUNNING}, $3, $4, $5)
ON CONFLICT DO NOTHING;

-- name: end_run
-- Record the end of a run, even if its start was not recorded. Returns no row if the end was recorded before.
INSERT INTO ingest_run AS r (run_id, supplier, status, holder, failure_code, started_at, finished_at, manifest, moves)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, '{}')
ON CONFLICT (run_id) DO UPDATE
SET status = $3, failure_code = $5, finished_at = $7, manifest = $8
WHERE r.status = {run.RUNNING}
RETURNING run_id;

-- name: append_moves
-- Append the numbers of journal entries to a run.
UPDATE ingest_run SET moves = moves || $2::bigint[] WHERE run_id = $1;

-- name: insert_move
-- Insert a file that was moved out of an inbox.
INSERT INTO ingest_move (supplier, run_id, file_name, moved_to, reason, moved_at) VALUES ($1, $2, $3, $4, $5, $6);

-- name: find_running
-- Return the active run of a supplier and its process.
SELECT run_id, holder, started_at FROM ingest_run
WHERE supplier = $1 AND status = {run.RUNNING}
ORDER BY started_at DESC, run_id DESC
LIMIT 1;

-- name: list_runs
-- Return runs after a position, newest first.
SELECT run_id, supplier, status, holder, failure_code, started_at, finished_at, manifest
FROM ingest_run
WHERE ($1::text IS NULL OR supplier = $1)
  AND ($2::text IS NULL OR status = $2)
  AND ($3::timestamptz IS NULL OR (started_at, run_id) < ($3, $4::text))
ORDER BY started_at DESC, run_id DESC
LIMIT $5;

-- name: find_run
-- Return a run.
SELECT run_id, supplier, status, holder, failure_code, started_at, finished_at, manifest, moves
FROM ingest_run WHERE run_id = $1;

-- name: list_run_moves
-- Return the files that a run moved.
SELECT file_name, moved_to, reason, moved_at, run_id FROM ingest_move WHERE run_id = $1 ORDER BY id;

-- name: list_moves
-- Return the files of a supplier that were moved, newest first.
SELECT file_name, moved_to, reason, moved_at, run_id FROM ingest_move WHERE supplier = $1 ORDER BY id DESC LIMIT $2;

-- name: prune
-- Delete old runs and moves; return the number of deleted rows.
WITH runs AS (
    DELETE FROM ingest_run WHERE run_id IN (
        SELECT run_id FROM ingest_run WHERE started_at < $1 AND status <> {run.RUNNING} ORDER BY started_at LIMIT $2
    ) RETURNING 1
), moves AS (
    DELETE FROM ingest_move WHERE id IN (
        SELECT id FROM ingest_move WHERE moved_at < $1 ORDER BY id LIMIT $2
    ) RETURNING 1
)
SELECT (SELECT count(*) FROM runs) + (SELECT count(*) FROM moves);
