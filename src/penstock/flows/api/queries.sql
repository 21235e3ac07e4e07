-- name: runs
-- The latest first. Run ids grow with each new run.
SELECT r.id, r.run_id, r.flow, r.status, r.reason, r.created_at, r.started_at, r.finished_at, r.created_by,
       r.scheduled_for, p.run_id AS parent_run_id, s.step_id AS parent_step_id
FROM flow_run r
LEFT JOIN flow_run p ON p.id = r.parent_run
LEFT JOIN flow_step s ON s.run = r.parent_run AND s.n = r.parent_n
WHERE r.id < $1 AND ($3::text IS NULL OR r.status = $3) AND ($4::timestamptz IS NULL OR r.created_at >= $4)
ORDER BY r.id DESC
LIMIT $2;

-- name: runs_of_flow
-- A separate statement, because it needs another plan than `runs`.
SELECT r.id, r.run_id, r.flow, r.status, r.reason, r.created_at, r.started_at, r.finished_at, r.created_by,
       r.scheduled_for, p.run_id AS parent_run_id, s.step_id AS parent_step_id
FROM flow_run r
LEFT JOIN flow_run p ON p.id = r.parent_run
LEFT JOIN flow_step s ON s.run = r.parent_run AND s.n = r.parent_n
WHERE r.flow = $5 AND r.id < $1 AND ($3::text IS NULL OR r.status = $3)
  AND ($4::timestamptz IS NULL OR r.created_at >= $4)
ORDER BY r.id DESC
LIMIT $2;

-- name: failed_runs
-- F18: the runs that failed after $1, the latest first; without sub-runs, whose parent run fails too.
SELECT r.run_id, r.flow, r.reason, r.finished_at
FROM flow_run r
WHERE r.finished_at > $1 AND r.status = {run.FAILED} AND r.parent_run IS NULL
ORDER BY r.finished_at DESC
LIMIT $2;

-- name: run
-- F1: a run by its name.
SELECT r.id, r.run_id, r.flow, r.status, r.reason, r.created_at, r.started_at, r.finished_at, r.created_by,
       r.scheduled_for, p.run_id AS parent_run_id, s.step_id AS parent_step_id, r.scope, r.fail_fast, r.moves
FROM flow_run r
LEFT JOIN flow_run p ON p.id = r.parent_run
LEFT JOIN flow_step s ON s.run = r.parent_run AND s.n = r.parent_n
WHERE r.run_id = $1;

-- name: steps
-- F1: the steps of a run, in their order.
SELECT t.n, t.step_id, t.kind, t.status, t.depends_on, t.required, coalesce(t.resolved_inputs, t.spec -> 'inputs') AS inputs,
       t.outputs, t.error, t.reason, t.artifacts, t.attempts, t.max_attempts, t.fence, t.worker, t.lease_until,
       t.due_at, t.started_at, t.finished_at, t.map_n
FROM flow_step t WHERE t.run = $1 ORDER BY t.n;

-- name: counts
-- The number of steps of a run by status.
SELECT t.status, count(*) AS steps FROM flow_step t WHERE t.run = $1 GROUP BY t.status;

-- name: moves
-- F18: the names of the steps of a run, and the ids of their journal entries.
SELECT t.step_id, t.moves FROM flow_step t WHERE t.run = $1;

-- name: step
-- A step with all columns that explain its status.
SELECT t.run, t.n, r.run_id, t.step_id, t.kind, t.status, t.fence, t.attempts, t.max_attempts, t.worker, t.reason,
       t.error, t.lease_until, t.due_at, t.started_at, t.finished_at, t.sealed IS NOT NULL AS is_sealed,
       t.resolved_inputs ->> 'runId' AS sub_run, r.status AS run_status, r.reason AS run_reason, r.flow
FROM flow_run r JOIN flow_step t ON t.run = r.id
WHERE r.run_id = $1 AND t.step_id = $2;

-- name: unmet
-- F18: the unmet dependencies of a step, in the order of the run.
SELECT p.step_id, p.status
FROM flow_step t JOIN flow_step p ON p.run = t.run AND p.n = ANY (t.depends_on)
WHERE t.run = $1 AND t.n = $2 AND p.status NOT IN {step.satisfied}
ORDER BY p.n;

-- name: items
-- F14: the number of items of a map, and the number of ended items.
SELECT count(*) AS items, count(*) FILTER (WHERE t.status IN {step.ended}) AS ended
FROM flow_step t WHERE t.run = $1 AND t.map_n = $2;

-- name: queue
-- F18: the number of running steps of a kind, and of steps ahead in the queue, up to $3.
SELECT (SELECT count(*) FROM flow_step t
        WHERE t.kind = $1 AND t.status = {step.RUNNING} AND t.lease_until IS NOT NULL) AS busy,
       (SELECT count(*) FROM (
            SELECT FROM flow_step t WHERE t.kind = $1 AND t.status = {step.READY} AND t.due_at < $2 LIMIT $3
        ) AS before) AS ahead;

-- name: statuses
-- The status of steps by run and name.
SELECT r.run_id, t.step_id, t.status
FROM unnest($1::text[], $2::text[]) AS s (run_id, step_id)
JOIN flow_run r ON r.run_id = s.run_id
JOIN flow_step t ON t.run = r.id AND t.step_id = s.step_id;

-- name: logs
-- F18: the log lines of a step, of all attempts or of one attempt.
SELECT l.id, l.at, l.attempt, l.fence, l.level, l.message
FROM flow_log l
WHERE l.run = $1 AND l.n = $2 AND l.id > $3 AND ($5::integer IS NULL OR l.attempt = $5)
ORDER BY l.id
LIMIT $4;

-- name: run_logs
-- F18: the log lines of all steps of a run, in the order of time.
SELECT l.id, l.at, t.step_id, l.attempt, l.fence, l.level, l.message
FROM flow_log l JOIN flow_step t ON t.run = l.run AND t.n = l.n
WHERE l.run = $1 AND ($2::timestamptz IS NULL OR (l.at, l.id) > ($2, $3::bigint))
ORDER BY l.at, l.id
LIMIT $4;

-- name: latest_runs
-- The latest run of each flow in $1.
SELECT f.flow, r.run_id, r.status, r.created_at, r.finished_at
FROM unnest($1::text[]) AS f (flow)
CROSS JOIN LATERAL (
    SELECT run_id, status, created_at, finished_at FROM flow_run WHERE flow_run.flow = f.flow ORDER BY id DESC LIMIT 1
) AS r;

-- name: schedules
-- F16: the state of the schedules of the flows in $1.
SELECT s.flow, s.is_paused, s.last_run, s.note FROM flow_schedule s WHERE s.flow = ANY ($1);
