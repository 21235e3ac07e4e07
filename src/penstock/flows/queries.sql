-- name: insert_run
-- F2: insert a run and its steps; return no row when the run id exists. If the run starts now ($14), its steps without
-- dependencies are READY. Lists of indexes are passed as text: the inner arrays of an array must have equal lengths.
WITH entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), run_entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), run AS (
    INSERT INTO flow_run (run_id, flow, status, scope, digest, fail_fast, open, parent_run, parent_n, depth,
                          scheduled_for, trace, created_by, created_at, started_at, moves)
    VALUES ($1, $2, CASE WHEN $14 THEN {run.RUNNING} ELSE {run.PENDING} END, $3, $4, $5, $6, $7, $8, $9, $10, $11,
            $12, $13, CASE WHEN $14 THEN $13::timestamptz END,
            CASE WHEN $14 THEN ARRAY[(SELECT number FROM run_entry)] ELSE '{}' END)
    ON CONFLICT (run_id) DO NOTHING
    RETURNING id, run_id
), steps AS (
    INSERT INTO flow_step (run, n, step_id, kind, status, depends_on, children, unmet, needs_evaluation, is_plain, required,
                           spec, resolved_inputs, map_n, max_attempts, time_limit, due_at, moves)
    SELECT run.id, s.n, s.step_id, s.kind, CASE WHEN <starts_ready> THEN {step.READY} ELSE {step.PENDING} END,
           s.depends_on::integer[], s.children::integer[], s.unmet, s.needs_evaluation, s.is_plain, s.required,
           s.spec::jsonb, s.resolved_inputs::jsonb, s.map_n, s.max_attempts, s.time_limit, $13,
           CASE WHEN <starts_ready> THEN ARRAY[(SELECT number FROM entry)] ELSE '{}' END
    FROM run CROSS JOIN unnest(
        $15::integer[], $16::text[], $17::text[], $18::text[], $19::text[], $20::integer[], $21::boolean[],
        $22::boolean[], $23::boolean[], $24::text[], $25::text[], $26::integer[], $27::integer[], $28::interval[])
        AS s (n, step_id, kind, depends_on, children, unmet, needs_evaluation, is_plain, required, spec, resolved_inputs,
              map_n, max_attempts, time_limit)
    RETURNING run, n, step_id, status, unmet, needs_evaluation
), entries AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), 'flows.step', $13, array_agg($1 || '/' || step_id),
           ARRAY[{step.PENDING}], ARRAY[{step.READY}], ARRAY['advance'], ARRAY[NULL::text], ARRAY[0::bigint]
    FROM steps WHERE status = {step.READY}
    HAVING count(*) > 0
), run_entries AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM run_entry), 'flows.run', $13, ARRAY[run_id], ARRAY[{run.PENDING}],
           ARRAY[{run.RUNNING}], ARRAY['advance'], ARRAY[NULL::text], ARRAY[NULL::bigint]
    FROM run WHERE $14
)
SELECT run.id, ARRAY(SELECT n FROM steps WHERE unmet = 0 AND needs_evaluation) AS to_evaluate FROM run;

-- name: insert_steps
-- Insert PENDING steps of a run. Lists of indexes are passed as text: the inner arrays of an array must have equal lengths.
INSERT INTO flow_step (run, n, step_id, kind, status, depends_on, children, unmet, needs_evaluation, is_plain, required,
                       spec, resolved_inputs, map_n, max_attempts, time_limit, due_at)
SELECT $1, s.n, s.step_id, s.kind, {step.PENDING}, s.depends_on::integer[], s.children::integer[], s.unmet,
       s.needs_evaluation, s.is_plain, s.required, s.spec::jsonb, s.resolved_inputs::jsonb, s.map_n, s.max_attempts,
       s.time_limit, $2
FROM unnest($3::integer[], $4::text[], $5::text[], $6::text[], $7::text[], $8::integer[], $9::boolean[],
            $10::boolean[], $11::boolean[], $12::text[], $13::text[], $14::integer[], $15::integer[],
            $16::interval[])
    AS s (n, step_id, kind, depends_on, children, unmet, needs_evaluation, is_plain, required, spec, resolved_inputs,
          map_n, max_attempts, time_limit);

-- name: reuse_steps
-- F19: mark steps that another run completed or skipped as completed or skipped in this run.
WITH entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), moved AS (
    UPDATE flow_step t
    SET status = s.status, outputs = s.outputs, error = s.error, artifacts = s.artifacts::jsonb, reason = s.reason,
        finished_at = $2, moves = t.moves || (SELECT number FROM entry)
    FROM unnest($4::integer[], $5::text[], $6::jsonb[], $7::jsonb[], $8::text[], $9::text[])
        AS s (n, status, outputs, error, artifacts, reason), flow_run r
    WHERE r.id = $1 AND t.run = r.id AND t.n = s.n AND t.status = {step.PENDING} AND s.status IN {step.satisfied}
    RETURNING t.step_id, t.fence, r.run_id, t.status, t.reason
)
INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
SELECT (SELECT number FROM entry), 'flows.step', $2, array_agg(run_id || '/' || step_id), ARRAY[{step.PENDING}],
       array_agg(status), ARRAY[$3], array_agg(reason), array_agg(fence)
FROM moved
HAVING count(*) > 0;

-- name: set_resumed_from
-- F19: record the run whose artifacts a resumed run uses.
UPDATE flow_run SET resumed_from = $2 WHERE id = $1;

-- name: move_run
-- Change the status of one run from a known status; return no row when the status is different.
WITH entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), moved AS (
    UPDATE flow_run r
    SET status = $3,
        reason = $4,
        started_at = CASE WHEN $3 = {run.RUNNING} THEN coalesce(r.started_at, $6::timestamptz) ELSE r.started_at END,
        finished_at = CASE WHEN $3 IN {run.ended} THEN $6::timestamptz END,
        is_reported = r.is_reported AND $3 IN {run.ended},
        moves = r.moves || (SELECT number FROM entry)
    WHERE r.id = $1 AND r.status = $2
    RETURNING r.id, r.run_id, r.flow, r.status, r.reason, r.finished_at - r.started_at AS duration
), entries AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), 'flows.run', $6, ARRAY[run_id], ARRAY[$2], ARRAY[$3], ARRAY[$5], ARRAY[$4],
           ARRAY[NULL::bigint]
    FROM moved
)
SELECT * FROM moved;

-- name: lock_runs
-- Lock runs, and with them the status of their steps. Always in order of their ids, and before any other lock.
SELECT r.id, r.run_id, r.flow, r.status, r.scope, r.fail_fast, r.parent_run, r.parent_n, r.depth, r.trace, r.digest
FROM flow_run r WHERE r.id = ANY ($1) ORDER BY r.id FOR NO KEY UPDATE;

-- name: advance
-- F3: make steps without unmet dependencies READY; return those that need evaluation unchanged.
WITH entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), moved AS (
    UPDATE flow_step t
    SET status = {step.READY}, due_at = $2, moves = t.moves || (SELECT number FROM entry)
    FROM flow_run r
    WHERE t.run = ANY ($1) AND r.id = t.run AND t.status = {step.PENDING} AND t.unmet = 0 AND NOT t.needs_evaluation
    RETURNING t.run, t.n, t.kind, t.step_id, r.run_id, t.fence
), entries AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), 'flows.step', $2, array_agg(run_id || '/' || step_id),
           ARRAY[{step.PENDING}], ARRAY[{step.READY}], ARRAY['advance'], ARRAY[NULL::text], array_agg(fence)
    FROM moved
    HAVING count(*) > 0
)
SELECT 'ready' AS change, run, n, kind FROM moved
UNION ALL
SELECT 'evaluate', t.run, t.n, t.kind FROM flow_step t
WHERE t.run = ANY ($1) AND t.status = {step.PENDING} AND t.unmet = 0 AND t.needs_evaluation;

-- name: settle
-- F3–F5: end steps whose status and fence are as expected. Their children become READY, or RUNNING if the worker prefetches
-- steps ($16 kinds, $17 limit, $18 worker, $19 end of the lease). A run ends with its last step.
WITH report AS MATERIALIZED (
    SELECT * FROM unnest($1::bigint[], $2::integer[], $3::bigint[], $4::text[], $5::text[], $6::jsonb[], $7::jsonb[],
                         $8::text[], $9::timestamptz[], $10::text[], $11::text[], $12::integer[], $13::integer[])
        AS report (run, n, fence, source, target, outputs, error, reason, due_at, digest, artifacts, uncounted, skips)
), locked AS MATERIALIZED (
    SELECT r.id, r.is_counted FROM flow_run r WHERE r.id = ANY ($1) ORDER BY r.id FOR NO KEY UPDATE
), entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), ended AS (
    UPDATE flow_step t
    SET status = report.target,
        outputs = report.outputs,
        error = report.error,
        reason = report.reason,
        artifacts = report.artifacts::jsonb,
        sealed = NULL,
        reported_fence = CASE WHEN report.digest IS NULL THEN t.reported_fence ELSE report.fence END,
        reported_digest = coalesce(report.digest, t.reported_digest),
        fence = t.fence + report.skips,
        attempts = t.attempts - report.uncounted,
        due_at = coalesce(report.due_at, t.due_at),
        lease_until = NULL,
        finished_at = CASE WHEN report.target = {step.READY} THEN NULL ELSE $14::timestamptz END,
        moves = <moves>
    FROM report JOIN flow_run r ON r.id = report.run + 0  -- + 0: prevents a plan that finds steps by their run alone
    WHERE (SELECT count(*) FROM locked) > 0  -- lock all runs before the first step is updated
      AND t.run = report.run AND t.n = report.n AND t.fence = report.fence AND t.status = report.source
      AND (t.sealed IS NULL OR report.artifacts IS NOT NULL)
    RETURNING t.run, t.n, t.step_id, t.kind, t.children, t.status, t.map_n, t.fence, t.attempts, t.reason, report.source,
              r.run_id
), met AS MATERIALIZED (
    SELECT e.run, child.n, count(*)::integer AS met, row_number() OVER () AS position
    FROM ended e CROSS JOIN LATERAL unnest(e.children) AS child (n)
    WHERE e.status IN {step.satisfied}
    GROUP BY e.run, child.n
), next AS (
    UPDATE flow_step t
    SET unmet = t.unmet - met.met,
        status = CASE WHEN <becomes_ready> AND <is_prefetched> THEN {step.RUNNING}
                      WHEN <becomes_ready> THEN {step.READY} ELSE t.status END,
        fence = t.fence + CASE WHEN <becomes_ready> AND <is_prefetched> THEN 1 ELSE 0 END,
        attempts = t.attempts + CASE WHEN <becomes_ready> AND <is_prefetched> THEN 1 ELSE 0 END,
        worker = CASE WHEN <becomes_ready> AND <is_prefetched> THEN $18 ELSE t.worker END,
        lease_until = CASE WHEN <becomes_ready> AND <is_prefetched> THEN $19 ELSE t.lease_until END,
        started_at = CASE WHEN <becomes_ready> AND <is_prefetched> THEN $14 ELSE t.started_at END,
        due_at = CASE WHEN <becomes_ready> THEN $14 ELSE t.due_at END,
        moves = CASE WHEN <becomes_ready> THEN <moves> ELSE t.moves END
    FROM met
    WHERE t.run = met.run AND t.n = met.n
    RETURNING t.*
), started AS (
    SELECT t.*, r.run_id, r.scope, r.trace
    FROM next t JOIN flow_run r ON r.id = t.run
    WHERE t.unmet = 0 AND NOT t.needs_evaluation AND t.status IN ({step.READY}, {step.RUNNING})
), done AS (
    SELECT run,
           count(*) FILTER (WHERE status IN {step.ended} AND children = '{}')::integer AS last,
           count(*) FILTER (WHERE status IN {step.ended})::integer AS closed,
           count(*) FILTER (WHERE status = {step.FAILED} AND map_n IS NULL)::integer AS failed
    FROM ended
    GROUP BY run
), run_entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), runs AS (
    UPDATE flow_run r
    SET open = <open>,
        failed = r.failed + done.failed,
        status = <run_reached>,
        reason = CASE WHEN <run_reached> = {run.SUCCEEDED} THEN NULL ELSE r.reason END,
        finished_at = CASE WHEN <run_reached> = r.status THEN r.finished_at ELSE $14 END,
        moves = CASE WHEN <run_reached> = r.status THEN r.moves ELSE r.moves || (SELECT number FROM run_entry) END
    FROM done
    -- is_counted is read from the locked row: the row of this statement's snapshot may be older.
    WHERE r.id = done.run AND (done.last + done.failed > 0
                               OR done.closed > 0 AND done.run IN (SELECT id FROM locked WHERE is_counted))
    RETURNING r.id, r.run_id, r.flow, r.status, r.finished_at - r.started_at AS duration,
              r.moves[cardinality(r.moves)] = (SELECT number FROM run_entry) AS is_moved
), entries AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), 'flows.step', $14, array_agg(m.subject), array_agg(m.source),
           array_agg(m.target), array_agg(m.actor), array_agg(m.reason), array_agg(m.fence)
    FROM (
        SELECT run_id || '/' || step_id AS subject, source, status AS target,
               CASE WHEN status = {step.READY} THEN 'advance' ELSE $15 END AS actor, reason, fence
        FROM ended
        UNION ALL
        SELECT run_id || '/' || step_id, {step.PENDING}, {step.READY}, 'advance', NULL, fence FROM started
        UNION ALL
        SELECT run_id || '/' || step_id, {step.READY}, {step.RUNNING}, $18, NULL, fence
        FROM started WHERE status = {step.RUNNING}
    ) AS m
    HAVING count(*) > 0
), run_entries AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM run_entry), 'flows.run', $14, array_agg(run_id), ARRAY[{run.RUNNING}],
           array_agg(status), ARRAY['advance'], ARRAY[NULL::text], ARRAY[NULL::bigint]
    FROM runs WHERE is_moved
    HAVING count(*) > 0
)
SELECT 'ended' AS change, run, n, kind, status, map_n, fence, step_id, run_id, attempts,
       NULL::jsonb AS inputs, NULL::jsonb AS scope, NULL::text AS trace, NULL::interval AS time_limit,
       NULL::boolean AS is_plain, NULL::text AS flow, NULL::interval AS duration
FROM ended
UNION ALL
SELECT CASE status WHEN {step.RUNNING} THEN 'claimed' ELSE 'ready' END, run, n, kind, status, map_n, fence, step_id,
       run_id, attempts, CASE WHEN status = {step.RUNNING} THEN coalesce(resolved_inputs, spec -> 'inputs') END,
       CASE WHEN status = {step.RUNNING} THEN scope END, trace, time_limit, is_plain, NULL, NULL
FROM started
UNION ALL
SELECT 'evaluate', run, n, kind, status, map_n, fence, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM next WHERE unmet = 0 AND needs_evaluation AND status IN ({step.PENDING}, {step.RUNNING})
UNION ALL
SELECT 'run', id, NULL, NULL, status, NULL, NULL, NULL, run_id, NULL, NULL, NULL, NULL, NULL, NULL, flow, duration
FROM runs WHERE is_moved;

-- name: settle_and_claim
-- F3–F5: do the work of `settle` for the most common case at half the cost: one step succeeded, its only child has no other
-- unmet dependency, and the same worker claims the child. No row: the case does not apply, and nothing changed. A row of
-- nulls: the child was cancelled at the same time.
WITH locked AS MATERIALIZED (
    SELECT r.run_id, r.scope, r.trace FROM flow_run r WHERE r.id = $1 AND NOT r.is_counted FOR NO KEY UPDATE
), entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), ended AS (
    UPDATE flow_step t
    SET status = {step.SUCCEEDED}, outputs = $4, error = NULL, reason = NULL, reported_fence = $3, reported_digest = $5,
        lease_until = NULL, finished_at = $6, moves = <moves>
    FROM flow_step c
    WHERE (SELECT count(*) FROM locked) > 0
      AND t.run = $1 AND t.n = $2 AND t.fence = $3 AND t.status = {step.RUNNING} AND t.sealed IS NULL
      AND cardinality(t.children) = 1 AND c.run = $1 AND c.n = t.children[1]
      AND c.unmet = 1 AND c.status = {step.PENDING} AND NOT c.needs_evaluation AND c.kind = ANY ($7::text[])
    RETURNING t.step_id, t.children[1] AS child, t.fence
), next AS (
    UPDATE flow_step t
    SET unmet = 0, status = {step.RUNNING}, fence = t.fence + 1, attempts = t.attempts + 1, worker = $8,
        lease_until = $9, started_at = $6, due_at = $6, moves = <moves>
    FROM ended e
    WHERE t.run = $1 AND t.n = e.child AND t.unmet = 1 AND t.status = {step.PENDING}
    RETURNING t.run, t.n, t.step_id, t.kind, t.fence, t.attempts, coalesce(t.resolved_inputs, t.spec -> 'inputs') AS inputs,
              t.time_limit, t.is_plain
), entries AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), 'flows.step', $6,
           array_remove(ARRAY[l.run_id || '/' || e.step_id, l.run_id || '/' || n.step_id, l.run_id || '/' || n.step_id], NULL),
           ARRAY[{step.RUNNING}, {step.PENDING}, {step.READY}], ARRAY[{step.SUCCEEDED}, {step.READY}, {step.RUNNING}],
           ARRAY[$8, 'advance', $8], ARRAY[NULL::text], ARRAY[e.fence, n.fence, n.fence]
    FROM locked l CROSS JOIN ended e LEFT JOIN next n ON true
)
SELECT n.*, l.run_id, l.scope, l.trace FROM locked l CROSS JOIN ended e LEFT JOIN next n ON true;

-- name: make_ready
-- F3, F8: make evaluated steps READY, with their resolved inputs.
WITH entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), moved AS (
    UPDATE flow_step t
    SET status = {step.READY}, resolved_inputs = s.resolved_inputs, due_at = $4,
        moves = t.moves || (SELECT number FROM entry)
    FROM unnest($1::bigint[], $2::integer[], $3::jsonb[]) AS s (run, n, resolved_inputs)
    JOIN flow_run r ON r.id = s.run + 0
    WHERE t.run = s.run AND t.n = s.n AND t.status = {step.PENDING}
    RETURNING t.run, t.n, t.kind, t.step_id, t.fence, r.run_id
), entries AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), 'flows.step', $4, array_agg(run_id || '/' || step_id),
           ARRAY[{step.PENDING}], ARRAY[{step.READY}], ARRAY['advance'], ARRAY[NULL::text], array_agg(fence)
    FROM moved
    HAVING count(*) > 0
)
SELECT run, n, kind FROM moved;

-- name: expand
-- F14: start a step of an engine kind. It runs until its items, or its sub-run, have ended.
WITH entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), moved AS (
    UPDATE flow_step t
    SET status = {step.RUNNING}, unmet = $3, resolved_inputs = $4, worker = 'advance', fence = t.fence + 1,
        attempts = t.attempts + 1, started_at = $5, moves = t.moves || (SELECT number FROM entry)
    FROM flow_run r
    WHERE t.run = $1 AND t.n = $2 AND r.id = t.run AND t.status = {step.PENDING}
    RETURNING t.run, t.n, t.step_id, t.fence, r.run_id
), entries AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), 'flows.step', $5, ARRAY[run_id || '/' || step_id],
           ARRAY[{step.PENDING}], ARRAY[{step.RUNNING}], ARRAY['advance'], ARRAY[NULL::text], ARRAY[fence]
    FROM moved
)
SELECT fence FROM moved;

-- name: cancel_waiting
-- F7, F9: cancel the steps of a run that have not started, and running maps, which only wait for their items.
WITH entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), before AS MATERIALIZED (
    SELECT run, n, status FROM flow_step WHERE run = $1
), moved AS (
    UPDATE flow_step t
    SET status = {step.CANCELLED}, reason = $3, finished_at = $4, moves = t.moves || (SELECT number FROM entry)
    FROM flow_run r, before
    WHERE r.id = $1 AND t.run = before.run AND t.n = before.n AND ($2::integer IS NULL OR t.map_n = $2)
      AND (t.status IN {step.waiting} OR t.status = {step.RUNNING} AND t.kind = 'map')
    RETURNING t.n, t.step_id, t.fence, r.run_id, before.status AS source
), entries AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), 'flows.step', $4, array_agg(run_id || '/' || step_id),
           array_agg(source), ARRAY[{step.CANCELLED}], ARRAY[$5], ARRAY[$3], array_agg(fence)
    FROM moved
    HAVING count(*) > 0
)
SELECT n FROM moved;

-- name: claim
-- F4: claim the oldest READY steps of each requested kind, up to its capacity. SKIP LOCKED gives a step to one worker.
WITH wanted AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::integer[]) AS wanted (kind, capacity)
), due AS MATERIALIZED (
    SELECT ready.address
    FROM wanted CROSS JOIN LATERAL (
        SELECT t.ctid AS address, t.due_at, t.id
        FROM flow_step t
        WHERE t.kind = wanted.kind AND t.status = {step.READY} AND t.due_at <= $4
        ORDER BY t.due_at, t.id
        LIMIT wanted.capacity
        FOR UPDATE SKIP LOCKED
    ) AS ready
    ORDER BY ready.due_at, ready.id
    LIMIT $3
), entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), claimed AS (
    UPDATE flow_step t
    SET status = {step.RUNNING}, fence = t.fence + 1, attempts = t.attempts + 1, worker = $5, lease_until = $6,
        started_at = $4, moves = <moves>
    -- The rows are locked, so their addresses are enough: with any other condition the planner reads all READY steps.
    WHERE t.ctid = ANY (ARRAY(SELECT address FROM due))
    RETURNING t.*
), named AS (
    SELECT t.*, r.run_id, r.scope, r.trace
    FROM claimed t JOIN flow_run r ON r.id = t.run
), entries AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), 'flows.step', $4, array_agg(t.run_id || '/' || t.step_id),
           ARRAY[{step.READY}], ARRAY[{step.RUNNING}], ARRAY[$5], ARRAY[NULL::text], array_agg(t.fence)
    FROM named t
    HAVING count(*) > 0
)
-- Only the first step of a run carries the scope, because many steps of the run may be claimed at once.
SELECT run, n, kind, fence, step_id, run_id, attempts, coalesce(resolved_inputs, spec -> 'inputs') AS inputs,
       CASE WHEN row_number() OVER (PARTITION BY run ORDER BY due_at, id) = 1 THEN scope END AS scope, trace,
       time_limit, is_plain
FROM named ORDER BY due_at, id;

-- name: count_running_steps
-- F16: the number of running steps of some kinds.
SELECT t.kind, count(*) AS running
FROM flow_step t WHERE t.status = {step.RUNNING} AND t.lease_until IS NOT NULL AND t.kind = ANY ($1)
GROUP BY t.kind;

-- name: heartbeat
-- F9: return the steps that are still claimed, and whether each must stop; extend the leases of the others. A step that is
-- settled at the same time is not extended.
WITH found AS MATERIALIZED (
    SELECT t.run, t.n, r.run_id, t.step_id, t.fence,
           r.status = {run.CANCELLED} OR r.status = {run.FAILED} AND r.fail_fast
           OR EXISTS (SELECT FROM flow_step m WHERE m.run = t.run AND m.n = t.map_n AND m.status <> {step.RUNNING})
               AS is_cancelled
    FROM unnest($1::text[], $2::text[], $3::bigint[]) AS report (run_id, step_id, fence)
    JOIN flow_run r ON r.run_id = report.run_id
    JOIN flow_step t ON t.run = r.id AND t.step_id = report.step_id
    WHERE t.fence = report.fence AND t.status = {step.RUNNING} AND t.lease_until IS NOT NULL
), free AS MATERIALIZED (
    SELECT t.run, t.n
    FROM found f JOIN flow_step t ON t.run = f.run AND t.n = f.n
    WHERE NOT f.is_cancelled AND t.fence = f.fence AND t.status = {step.RUNNING} AND t.lease_until IS NOT NULL
    FOR NO KEY UPDATE OF t SKIP LOCKED
), extended AS (
    UPDATE flow_step t
    SET lease_until = greatest(t.lease_until, least($4, t.started_at + t.time_limit + interval '10 seconds'))
    FROM free WHERE t.run = free.run AND t.n = free.n
)
SELECT run_id, step_id, fence, is_cancelled FROM found;

-- name: expired_leases
-- F11: running steps whose lease has expired.
SELECT t.run, t.n FROM flow_step t
WHERE t.status = {step.RUNNING} AND t.lease_until < $1
ORDER BY t.lease_until LIMIT $2;

-- name: read_steps
-- The steps with the given keys, with everything that decides their next status.
SELECT t.run, t.n, t.step_id, t.kind, t.status, t.fence, t.attempts, t.max_attempts, t.required, t.spec, t.resolved_inputs,
       t.map_n, t.lease_until, t.sealed, t.reported_fence, t.reported_digest, t.outputs, t.error, t.artifacts, t.depends_on,
       t.children, t.unmet, t.worker, t.needs_evaluation, t.started_at, r.run_id, r.scope, r.fail_fast, r.depth, r.trace,
       r.is_counted, r.status AS run_status,
       (SELECT m.status FROM flow_step m WHERE m.run = t.run AND m.n = t.map_n) AS map_status
FROM unnest($1::bigint[], $2::integer[]) AS s (run, n)
JOIN flow_step t ON t.run = s.run AND t.n = s.n
JOIN flow_run r ON r.id = t.run + 0;

-- name: find_steps
-- The keys and kinds of steps, found by their names.
SELECT DISTINCT r.run_id, t.step_id, t.run, t.n, t.kind
FROM unnest($1::text[], $2::text[]) AS s (run_id, step_id)
JOIN flow_run r ON r.run_id = s.run_id
JOIN flow_step t ON t.run = r.id AND t.step_id = s.step_id;

-- name: seal
-- F6: accept a report as final. No other worker gets the step while its artifacts are published.
UPDATE flow_step t SET sealed = $4, lease_until = NULL
WHERE t.run = $1 AND t.n = $2 AND t.fence = $3 AND t.status = {step.RUNNING} AND t.lease_until IS NOT NULL
RETURNING t.n;

-- name: is_sealed
-- F6: whether the artifacts of the accepted report are not published yet.
SELECT EXISTS (SELECT FROM flow_step WHERE run = $1 AND n = $2 AND fence = $3 AND sealed IS NOT NULL);

-- name: sealed_before
-- Steps whose artifacts were not published by the process that accepted the report.
SELECT t.run, t.n, r.run_id, t.step_id
FROM flow_step t JOIN flow_run r ON r.id = t.run
WHERE t.sealed IS NOT NULL AND (t.sealed ->> 'at')::timestamptz < $1
ORDER BY t.run, t.n LIMIT $2;

-- name: add_late_outputs
-- F5: add outputs that may change after a step has ended.
UPDATE flow_step t SET outputs = t.outputs || $4
WHERE t.run = $1 AND t.n = $2 AND t.fence = $3 AND t.status = {step.SUCCEEDED} AND NOT t.outputs @> $4
RETURNING t.n;

-- name: step_outputs
-- The outputs of steps of a run, for the expressions that refer to them.
SELECT t.step_id, t.status, t.outputs FROM flow_step t WHERE t.run = $1 AND t.step_id = ANY ($2);

-- name: skipped_steps
-- The skipped steps among some steps of a run.
SELECT t.n, t.step_id FROM flow_step t WHERE t.run = $1 AND t.n = ANY ($2) AND t.status = {step.SKIPPED};

-- name: outer_flows
-- F14: the flows that contain a run, including its own flow.
WITH RECURSIVE outer_run AS (
    SELECT id, flow, parent_run FROM flow_run WHERE id = $1
    UNION ALL
    SELECT r.id, r.flow, r.parent_run FROM flow_run r JOIN outer_run o ON r.id = o.parent_run
)
SELECT flow FROM outer_run WHERE flow IS NOT NULL;

-- name: map_items
-- F14: the items of a map, in order.
SELECT t.n, t.status, t.outputs FROM flow_step t WHERE t.run = $1 AND t.map_n = $2 ORDER BY t.n;

-- name: next_index
-- The first free step index of a run, which is its number of steps.
SELECT max(t.n) + 1 FROM flow_step t WHERE t.run = $1;

-- name: run_graph
-- All steps of a run, with the columns that decide which steps are reopened.
SELECT t.n, t.step_id, t.kind, t.status, t.depends_on, t.children, t.map_n, t.fence, t.reason
FROM flow_step t WHERE t.run = $1 ORDER BY t.n;

-- name: reopen
-- F10: reset steps to PENDING. `recount` must follow, for the steps that depend on them.
WITH entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), before AS MATERIALIZED (
    SELECT run, n, status FROM flow_step WHERE run = $1 AND n = ANY ($2)
), moved AS (
    UPDATE flow_step t
    SET status = {step.PENDING}, attempts = 0, outputs = NULL, error = NULL, reason = NULL,
        -- The inputs of an item are resolved only once, when its map is expanded.
        resolved_inputs = CASE WHEN t.map_n IS NULL THEN NULL ELSE t.resolved_inputs END,
        artifacts = NULL, finished_at = NULL, worker = NULL, due_at = $3, moves = t.moves || (SELECT number FROM entry)
    FROM flow_run r, before
    WHERE r.id = $1 AND t.run = before.run AND t.n = before.n AND t.status IN {step.reopen}
    RETURNING t.n, t.step_id, t.fence, r.run_id, before.status AS source
), entries AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), 'flows.step', $3, array_agg(run_id || '/' || step_id), array_agg(source),
           ARRAY[{step.PENDING}], ARRAY[$4], ARRAY[$5], array_agg(fence)
    FROM moved
    HAVING count(*) > 0
)
SELECT n FROM moved;

-- name: set_run_reason
-- Store the reason of a failed run.
UPDATE flow_run SET reason = $2 WHERE id = $1;

-- name: recount
-- F3: recount the unmet dependencies of each waiting step of a run; return the steps whose counter was wrong. Steps are
-- found by the run of the joined row, not by $1: otherwise a plan for a small table compares all steps with all steps.
WITH waiting AS MATERIALIZED (
    SELECT t.run, t.n, t.depends_on FROM flow_step t WHERE t.run = $1 AND t.status = {step.PENDING}
), truth AS MATERIALIZED (
    SELECT w.run, w.n, count(p.n)::integer AS unmet
    FROM waiting w
    LEFT JOIN LATERAL unnest(w.depends_on) AS before (n) ON true
    LEFT JOIN flow_step p ON p.run = w.run AND p.n = before.n AND p.status NOT IN {step.satisfied}
    GROUP BY w.run, w.n
    UNION ALL
    SELECT t.run, t.n, count(i.n) FILTER (WHERE i.status NOT IN {step.satisfied})::integer
    FROM flow_step t LEFT JOIN flow_step i ON i.run = t.run AND i.map_n = t.n
    WHERE t.run = $1 AND t.status = {step.RUNNING} AND t.kind = 'map'
    GROUP BY t.run, t.n
)
UPDATE flow_step t SET unmet = truth.unmet
FROM truth WHERE t.run = truth.run AND t.n = truth.n AND t.unmet <> truth.unmet
RETURNING t.n;

-- name: recount_run
-- Recount the open and the failed steps of a run. After an operator action ($2) all steps that have not ended are counted:
-- a step without children may have ended before the steps it depends on.
UPDATE flow_run r
SET is_counted = r.is_counted OR $2,
    open = CASE WHEN r.is_counted OR $2 THEN truth.open ELSE truth.last END,
    failed = truth.failed
FROM (
    SELECT count(*) FILTER (WHERE status NOT IN {step.ended})::integer AS open,
           count(*) FILTER (WHERE children = '{}' AND status NOT IN {step.ended})::integer AS last,
           count(*) FILTER (WHERE status = {step.FAILED} AND map_n IS NULL)::integer AS failed
    FROM flow_step WHERE run = $1
) AS truth
WHERE r.id = $1 AND (r.is_counted OR $2, r.open, r.failed) IS DISTINCT FROM (
    r.is_counted, CASE WHEN r.is_counted OR $2 THEN truth.open ELSE truth.last END, truth.failed)
RETURNING r.open, r.failed;

-- name: run_progress
-- The status of a run, and its numbers of open and failed steps.
SELECT r.status, r.open, r.failed FROM flow_run r WHERE r.id = $1;

-- name: completed_maps
-- Running maps of a run whose items have all succeeded or been skipped.
SELECT t.run, t.n FROM flow_step t
WHERE t.run = $1 AND t.status = {step.RUNNING} AND t.kind = 'map' AND t.unmet = 0;

-- name: running_runs
-- A page of the running runs.
SELECT id FROM flow_run WHERE id > $1 AND status = {run.RUNNING} ORDER BY id LIMIT $2;

-- name: inconsistent_runs
-- F3: the inconsistent runs among some runs: a step or a map waits although its dependencies are satisfied, or all steps
-- have ended.
SELECT r.id FROM unnest($1::bigint[]) AS r (id)
WHERE EXISTS (
    SELECT FROM flow_step t
    WHERE t.run = r.id AND t.status = {step.PENDING} AND NOT EXISTS (
        SELECT FROM flow_step p
        WHERE p.run = t.run AND p.n = ANY (t.depends_on) AND p.status NOT IN {step.satisfied}
    )
) OR EXISTS (
    SELECT FROM flow_step t
    WHERE t.run = r.id AND t.status = {step.RUNNING} AND t.kind = 'map' AND NOT EXISTS (
        SELECT FROM flow_step i WHERE i.run = t.run AND i.map_n = t.n AND i.status NOT IN {step.satisfied}
    )
) OR NOT EXISTS (
    SELECT FROM flow_step t WHERE t.run = r.id AND t.status NOT IN {step.ended}
);

-- name: find_run
-- A run, found by its run id.
SELECT id, run_id, flow, status, digest FROM flow_run WHERE run_id = $1;

-- name: parent_of_ended
-- F14: the step that started a sub-run which has ended.
SELECT p.run_id, s.step_id
FROM flow_run r
JOIN flow_run p ON p.id = r.parent_run
JOIN flow_step s ON s.run = r.parent_run AND s.n = r.parent_n
WHERE r.id = $1 AND r.status IN {run.ended};

-- name: unreported_runs
-- F14: sub-runs that have ended and are not reported to their step; and running sub-runs whose step has ended.
SELECT r.id, r.run_id, r.parent_run, r.parent_n, r.status, r.reason
FROM flow_run r JOIN flow_step t ON t.run = r.parent_run AND t.n = r.parent_n
JOIN flow_run p ON p.id = r.parent_run
WHERE r.parent_run IS NOT NULL AND NOT r.is_reported
  AND (r.status IN {run.ended} OR t.status <> {step.RUNNING}
       OR p.status = {run.CANCELLED} OR p.status = {run.FAILED} AND p.fail_fast)
ORDER BY r.id LIMIT $1;

-- name: mark_reported
-- F14: record that the end of a sub-run is reported to its step.
UPDATE flow_run SET is_reported = true WHERE id = $1 AND NOT is_reported;

-- name: last_outputs
-- The outputs of the last steps of a run.
SELECT t.step_id, t.outputs FROM flow_step t
WHERE t.run = $1 AND t.children = '{}' AND t.map_n IS NULL AND t.status = {step.SUCCEEDED} ORDER BY t.n;

-- name: count_running_runs
-- F16: the number of running runs of a flow.
SELECT count(*) FROM flow_run WHERE flow = $1 AND status = {run.RUNNING};

-- name: waiting_runs
-- F16: the runs of a flow that wait to start, oldest first.
SELECT id FROM flow_run WHERE flow = $1 AND status = {run.PENDING} ORDER BY id LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED;

-- name: waiting_flows
-- F16: flows with runs that wait to start.
SELECT DISTINCT flow FROM flow_run WHERE status = {run.PENDING} AND flow IS NOT NULL;

-- name: insert_logs
-- F18: insert log lines of attempts; lines under an old fence, and above the limit of a step, are dropped.
INSERT INTO flow_log (run, n, fence, attempt, at, level, message)
SELECT t.run, t.n, s.fence, t.attempts, $6, s.level, s.message
FROM unnest($1::text[], $2::text[], $3::bigint[], $4::text[], $5::text[]) AS s (run_id, step_id, fence, level, message)
JOIN flow_run r ON r.run_id = s.run_id
JOIN flow_step t ON t.run = r.id AND t.step_id = s.step_id AND t.fence = s.fence
WHERE NOT EXISTS (SELECT FROM flow_log l WHERE l.run = t.run AND l.n = t.n OFFSET $7::integer - 1)
RETURNING id;

-- name: expired_runs
-- Runs that ended before the retention time, and that no resumed run depends on.
SELECT r.id, r.run_id FROM flow_run r
WHERE r.finished_at < $1 AND r.status IN {run.ended}
  AND NOT EXISTS (SELECT FROM flow_run later WHERE later.resumed_from = r.id)
ORDER BY r.finished_at LIMIT $2;

-- name: delete_runs
-- Delete runs and their steps, unless a run was reopened meanwhile.
WITH deleted AS (
    DELETE FROM flow_run WHERE id = ANY ($1) AND finished_at < $2 AND status IN {run.ended} RETURNING id
)
DELETE FROM flow_step WHERE run = ANY (ARRAY(SELECT id FROM deleted));

-- name: read_run
-- F1: all properties of a run.
SELECT id, run_id, flow, status, scope, digest, fail_fast, reason, open, failed, parent_run, scheduled_for, trace,
       created_by, created_at, started_at, finished_at, moves
FROM flow_run WHERE id = $1;

-- name: read_run_steps
-- F1: all properties of the steps of a run.
SELECT n, step_id, kind, status, depends_on, unmet, required, spec, resolved_inputs, map_n, outputs, error, reason, artifacts,
       fence, attempts, max_attempts, worker, lease_until, due_at, started_at, finished_at, moves, sealed
FROM flow_step WHERE run = $1 ORDER BY n;

-- name: insert_schedule
-- F16: register a new schedule; earlier times are not caught up.
INSERT INTO flow_schedule (flow, evaluated_until) VALUES ($1, $2) ON CONFLICT (flow) DO NOTHING;

-- name: find_schedule
-- F16: the time up to which the schedule of a flow has been evaluated.
SELECT evaluated_until, is_paused, last_run FROM flow_schedule WHERE flow = $1;

-- name: update_schedule
-- F16: record the time up to which a schedule has been evaluated, and the run that was started.
UPDATE flow_schedule
SET evaluated_until = greatest(evaluated_until, $2), last_run = coalesce($3, last_run), note = $4
WHERE flow = $1;

-- name: pause_schedule
-- F16: pause or resume a schedule. Times that passed during the pause are not caught up.
INSERT INTO flow_schedule (flow, evaluated_until, is_paused) VALUES ($1, $2, $3)
ON CONFLICT (flow) DO UPDATE SET is_paused = $3, evaluated_until = greatest(flow_schedule.evaluated_until, $2);

-- name: is_run_active
-- Whether a run is still active.
SELECT EXISTS (SELECT FROM flow_run WHERE run_id = $1 AND status IN {run.active});

-- name: count_ready_steps
-- F18: the number of READY steps of each kind, and the waiting time of the oldest in seconds.
SELECT t.kind, count(*), greatest(0, extract(epoch FROM $1 - min(t.due_at)))::float8
FROM flow_step t WHERE t.status = {step.READY} GROUP BY t.kind ORDER BY count(*) DESC LIMIT 200;

-- name: count_active_runs
-- F18: the number of active runs by status.
SELECT r.status, count(*) FROM flow_run r WHERE r.status IN {run.active} GROUP BY r.status;
