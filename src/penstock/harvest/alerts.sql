-- name: raise
-- Something somebody has to be told of, as soon as this commits.
INSERT INTO harvest_alert (feed, run_id, code, severity, message, raised_at, due_at) VALUES ($1, $2, $3, $4, $5, $6, $6);

-- name: due
-- The next alert to be told, held until the end of the transaction.
SELECT id, feed, run_id, code, severity, message, raised_at, told, attempts
FROM harvest_alert WHERE NOT is_told AND due_at <= $1 ORDER BY due_at LIMIT 1 FOR UPDATE SKIP LOCKED;

-- name: told
-- What came of telling an alert.
UPDATE harvest_alert SET told = $2, attempts = attempts + 1, due_at = $3, error = $4, is_told = $5 WHERE id = $1;

-- name: untold
-- How many alerts some channel has not taken yet.
SELECT count(*) FROM harvest_alert WHERE NOT is_told;

-- name: latest
-- What somebody was told of, the latest first.
SELECT id, feed, run_id, code, severity, message, raised_at, told, attempts, error, is_told
FROM harvest_alert WHERE feed = $1 ORDER BY id DESC LIMIT $2;
