-- name: insert_run
-- F2: a new run with its steps; nothing back when its id is taken. Unless it has to wait ($14), it has begun, and what
-- waits for nothing is READY. Lists of places come as text: arrays of arrays must all be of one length.
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
                           spec, given, map_n, max_attempts, time_limit, due_at, moves)
    SELECT run.id, s.n, s.step_id, s.kind, CASE WHEN <first> THEN {step.READY} ELSE {step.PENDING} END,
           s.depends_on::integer[], s.children::integer[], s.unmet, s.needs_evaluation, s.is_plain, s.required,
           s.spec::jsonb, s.given::jsonb, s.map_n, s.max_attempts, s.time_limit, $13,
           CASE WHEN <first> THEN ARRAY[(SELECT number FROM entry)] ELSE '{}' END
    FROM run CROSS JOIN unnest(
        $15::integer[], $16::text[], $17::text[], $18::text[], $19::text[], $20::integer[], $21::boolean[],
        $22::boolean[], $23::boolean[], $24::text[], $25::text[], $26::integer[], $27::integer[], $28::interval[])
        AS s (n, step_id, kind, depends_on, children, unmet, needs_evaluation, is_plain, required, spec, given, map_n,
              max_attempts, time_limit)
    RETURNING run, n, step_id, status, unmet, needs_evaluation
), noted AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), 'flows.step', $13, array_agg($1 || '/' || step_id),
           ARRAY[{step.PENDING}], ARRAY[{step.READY}], ARRAY['advance'], ARRAY[NULL::text], ARRAY[0::bigint]
    FROM steps WHERE status = {step.READY}
    HAVING count(*) > 0
), run_noted AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM run_entry), 'flows.run', $13, ARRAY[run_id], ARRAY[{run.PENDING}],
           ARRAY[{run.RUNNING}], ARRAY['advance'], ARRAY[NULL::text], ARRAY[NULL::bigint]
    FROM run WHERE $14
)
SELECT run.id, ARRAY(SELECT n FROM steps WHERE unmet = 0 AND needs_evaluation) AS looks FROM run;

-- name: insert_steps
-- The steps of a run, all waiting. Lists of places come as text: arrays of arrays must all be of one length.
INSERT INTO flow_step (run, n, step_id, kind, status, depends_on, children, unmet, needs_evaluation, is_plain, required,
                       spec, given, map_n, max_attempts, time_limit, due_at)
SELECT $1, s.n, s.step_id, s.kind, {step.PENDING}, s.depends_on::integer[], s.children::integer[], s.unmet,
       s.needs_evaluation, s.is_plain, s.required, s.spec::jsonb, s.given::jsonb, s.map_n, s.max_attempts, s.time_limit, $2
FROM unnest($3::integer[], $4::text[], $5::text[], $6::text[], $7::text[], $8::integer[], $9::boolean[],
            $10::boolean[], $11::boolean[], $12::text[], $13::text[], $14::integer[], $15::integer[],
            $16::interval[])
    AS s (n, step_id, kind, depends_on, children, unmet, needs_evaluation, is_plain, required, spec, given, map_n,
          max_attempts, time_limit);

-- name: reuse_steps
-- F19: what another run already did, or did without, as done here too.
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

-- name: resumed_from
-- F19: a run needs another's artifacts.
UPDATE flow_run SET resumed_from = $2 WHERE id = $1;

-- name: move_run
-- One run from where it is known to stand.
WITH entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), moved AS (
    UPDATE flow_run r
    SET status = $3,
        reason = $4,
        started_at = CASE WHEN $3 = {run.RUNNING} THEN coalesce(r.started_at, $6::timestamptz) ELSE r.started_at END,
        finished_at = CASE WHEN $3 IN {run.ended} THEN $6::timestamptz END,
        is_told = r.is_told AND $3 IN {run.ended},
        moves = r.moves || (SELECT number FROM entry)
    WHERE r.id = $1 AND r.status = $2
    RETURNING r.run_id
), noted AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), 'flows.run', $6, ARRAY[run_id], ARRAY[$2], ARRAY[$3], ARRAY[$5], ARRAY[$4],
           ARRAY[NULL::bigint]
    FROM moved
)
SELECT count(*) FROM moved;

-- name: lock_runs
-- Be the only one to move some runs and their steps. Always in one order, and before anything else is locked.
SELECT r.id, r.run_id, r.flow, r.status, r.scope, r.fail_fast, r.parent_run, r.parent_n, r.depth, r.trace, r.digest
FROM flow_run r WHERE r.id = ANY ($1) ORDER BY r.id FOR NO KEY UPDATE;

-- name: advance
-- F3: READY is what waits for nothing any more; what must be looked at first is told as it is.
WITH entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), moved AS (
    UPDATE flow_step t
    SET status = {step.READY}, due_at = $2, moves = t.moves || (SELECT number FROM entry)
    FROM flow_run r
    WHERE t.run = ANY ($1) AND r.id = t.run AND t.status = {step.PENDING} AND t.unmet = 0 AND NOT t.needs_evaluation
    RETURNING t.run, t.n, t.kind, t.step_id, r.run_id, t.fence
), noted AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), 'flows.step', $2, array_agg(run_id || '/' || step_id),
           ARRAY[{step.PENDING}], ARRAY[{step.READY}], ARRAY['advance'], ARRAY[NULL::text], array_agg(fence)
    FROM moved
    HAVING count(*) > 0
)
SELECT 'ready' AS what, run, n, kind FROM moved
UNION ALL
SELECT 'look', t.run, t.n, t.kind FROM flow_step t
WHERE t.run = ANY ($1) AND t.status = {step.PENDING} AND t.unmet = 0 AND t.needs_evaluation;

-- name: settle
-- F3–F5: end steps that still stand as they are said to, and give their children their turn: READY, or at once RUNNING
-- for a worker that asked for more ($16 kinds, $17 of them at most, $18 who, $19 until when). A run ends with its last.
WITH said AS MATERIALIZED (
    SELECT * FROM unnest($1::bigint[], $2::integer[], $3::bigint[], $4::text[], $5::text[], $6::jsonb[], $7::jsonb[],
                         $8::text[], $9::timestamptz[], $10::text[], $11::text[], $12::integer[], $13::integer[])
        AS said (run, n, fence, source, target, outputs, error, reason, due_at, digest, artifacts, uncounted, skips)
), locked AS MATERIALIZED (
    SELECT r.id, r.is_counted FROM flow_run r WHERE r.id = ANY ($1) ORDER BY r.id FOR NO KEY UPDATE
), entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), ended AS (
    UPDATE flow_step t
    SET status = said.target,
        outputs = said.outputs,
        error = said.error,
        reason = said.reason,
        artifacts = said.artifacts::jsonb,
        sealed = NULL,
        said_fence = CASE WHEN said.digest IS NULL THEN t.said_fence ELSE said.fence END,
        said_digest = coalesce(said.digest, t.said_digest),
        fence = t.fence + said.skips,
        attempts = t.attempts - said.uncounted,
        due_at = coalesce(said.due_at, t.due_at),
        lease_until = NULL,
        finished_at = CASE WHEN said.target = {step.READY} THEN NULL ELSE $14::timestamptz END,
        moves = <moves>
    FROM said JOIN flow_run r ON r.id = said.run + 0  -- + 0: else steps may be looked up by their run alone
    WHERE (SELECT count(*) FROM locked) > 0  -- all of them, before the first step is touched
      AND t.run = said.run AND t.n = said.n AND t.fence = said.fence AND t.status = said.source
      AND (t.sealed IS NULL OR said.artifacts IS NOT NULL)
    RETURNING t.run, t.n, t.step_id, t.kind, t.children, t.status, t.map_n, t.fence, t.reason, said.source,
              r.run_id
), met AS MATERIALIZED (
    SELECT e.run, child.n, count(*)::integer AS met, row_number() OVER () AS place
    FROM ended e CROSS JOIN LATERAL unnest(e.children) AS child (n)
    WHERE e.status IN {step.satisfied}
    GROUP BY e.run, child.n
), next AS (
    UPDATE flow_step t
    SET unmet = t.unmet - met.met,
        status = CASE WHEN <turn> THEN CASE WHEN <handed> THEN {step.RUNNING} ELSE {step.READY} END ELSE t.status END,
        fence = t.fence + CASE WHEN <turn> AND <handed> THEN 1 ELSE 0 END,
        attempts = t.attempts + CASE WHEN <turn> AND <handed> THEN 1 ELSE 0 END,
        worker = CASE WHEN <turn> AND <handed> THEN $18 ELSE t.worker END,
        lease_until = CASE WHEN <turn> AND <handed> THEN $19 ELSE t.lease_until END,
        started_at = CASE WHEN <turn> AND <handed> THEN $14 ELSE t.started_at END,
        due_at = CASE WHEN <turn> THEN $14 ELSE t.due_at END,
        moves = CASE WHEN <turn> THEN <moves> ELSE t.moves END
    FROM met
    WHERE t.run = met.run AND t.n = met.n
    RETURNING t.*
), turned AS (
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
    -- Whether all are counted is asked of the row that was locked: that of our snapshot may be older.
    WHERE r.id = done.run AND (done.last + done.failed > 0
                               OR done.closed > 0 AND done.run IN (SELECT id FROM locked WHERE is_counted))
    RETURNING r.id, r.run_id, r.status, r.moves[cardinality(r.moves)] = (SELECT number FROM run_entry) AS is_moved
), noted AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), 'flows.step', $14, array_agg(m.subject), array_agg(m.source),
           array_agg(m.target), array_agg(m.actor), array_agg(m.reason), array_agg(m.fence)
    FROM (
        SELECT run_id || '/' || step_id AS subject, source, status AS target,
               CASE WHEN status = {step.READY} THEN 'advance' ELSE $15 END AS actor, reason, fence
        FROM ended
        UNION ALL
        SELECT run_id || '/' || step_id, {step.PENDING}, {step.READY}, 'advance', NULL, fence FROM turned
        UNION ALL
        SELECT run_id || '/' || step_id, {step.READY}, {step.RUNNING}, $18, NULL, fence
        FROM turned WHERE status = {step.RUNNING}
    ) AS m
    HAVING count(*) > 0
), runs_noted AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM run_entry), 'flows.run', $14, array_agg(run_id), ARRAY[{run.RUNNING}],
           array_agg(status), ARRAY['advance'], ARRAY[NULL::text], ARRAY[NULL::bigint]
    FROM runs WHERE is_moved
    HAVING count(*) > 0
)
SELECT 'ended' AS what, run, n, kind, status, map_n, fence, step_id, run_id, NULL::integer AS attempts,
       NULL::jsonb AS inputs, NULL::jsonb AS scope, NULL::text AS trace, NULL::interval AS time_limit,
       NULL::boolean AS is_plain
FROM ended
UNION ALL
SELECT CASE status WHEN {step.RUNNING} THEN 'handed' ELSE 'ready' END, run, n, kind, status, map_n, fence, step_id,
       run_id, attempts, CASE WHEN status = {step.RUNNING} THEN coalesce(given, spec -> 'inputs') END,
       CASE WHEN status = {step.RUNNING} THEN scope END, trace, time_limit, is_plain
FROM turned
UNION ALL
SELECT 'look', run, n, kind, status, map_n, fence, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM next WHERE unmet = 0 AND needs_evaluation AND status IN ({step.PENDING}, {step.RUNNING})
UNION ALL
SELECT 'run', id, NULL, NULL, status, NULL, NULL, NULL, run_id, NULL, NULL, NULL, NULL, NULL, NULL
FROM runs WHERE is_moved;

-- name: pass_on
-- F3–F5: what `settle` does, for the commonest case at half the cost: one step succeeded, and the one step after it waits
-- for nothing else and goes to the same worker. No row back: it is not that case, and nothing was done. A row of nulls: it
-- was cancelled at this very moment.
WITH locked AS MATERIALIZED (
    SELECT r.run_id, r.scope, r.trace FROM flow_run r WHERE r.id = $1 AND NOT r.is_counted FOR NO KEY UPDATE
), entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), ended AS (
    UPDATE flow_step t
    SET status = {step.SUCCEEDED}, outputs = $4, error = NULL, reason = NULL, said_fence = $3, said_digest = $5,
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
    RETURNING t.run, t.n, t.step_id, t.kind, t.fence, t.attempts, coalesce(t.given, t.spec -> 'inputs') AS inputs,
              t.time_limit, t.is_plain
), noted AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), 'flows.step', $6,
           array_remove(ARRAY[l.run_id || '/' || e.step_id, l.run_id || '/' || n.step_id, l.run_id || '/' || n.step_id], NULL),
           ARRAY[{step.RUNNING}, {step.PENDING}, {step.READY}], ARRAY[{step.SUCCEEDED}, {step.READY}, {step.RUNNING}],
           ARRAY[$8, 'advance', $8], ARRAY[NULL::text], ARRAY[e.fence, n.fence, n.fence]
    FROM locked l CROSS JOIN ended e LEFT JOIN next n ON true
)
SELECT n.*, l.run_id, l.scope, l.trace FROM locked l CROSS JOIN ended e LEFT JOIN next n ON true;

-- name: make_ready
-- F3, F8: looked at, and found to have its turn, with its inputs filled in.
WITH entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), moved AS (
    UPDATE flow_step t
    SET status = {step.READY}, given = s.given, due_at = $4, moves = t.moves || (SELECT number FROM entry)
    FROM unnest($1::bigint[], $2::integer[], $3::jsonb[]) AS s (run, n, given) JOIN flow_run r ON r.id = s.run + 0
    WHERE t.run = s.run AND t.n = s.n AND t.status = {step.PENDING}
    RETURNING t.run, t.n, t.kind, t.step_id, t.fence, r.run_id
), noted AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), 'flows.step', $4, array_agg(run_id || '/' || step_id),
           ARRAY[{step.PENDING}], ARRAY[{step.READY}], ARRAY['advance'], ARRAY[NULL::text], array_agg(fence)
    FROM moved
    HAVING count(*) > 0
)
SELECT run, n, kind FROM moved;

-- name: expand
-- F14: one of the engine's own kinds begins: it runs until its items, or its inner run, have ended.
WITH entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), moved AS (
    UPDATE flow_step t
    SET status = {step.RUNNING}, unmet = $3, given = $4, worker = 'advance', fence = t.fence + 1,
        attempts = t.attempts + 1, started_at = $5, moves = t.moves || (SELECT number FROM entry)
    FROM flow_run r
    WHERE t.run = $1 AND t.n = $2 AND r.id = t.run AND t.status = {step.PENDING}
    RETURNING t.run, t.n, t.step_id, t.fence, r.run_id
), noted AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), 'flows.step', $5, ARRAY[run_id || '/' || step_id],
           ARRAY[{step.PENDING}], ARRAY[{step.RUNNING}], ARRAY['advance'], ARRAY[NULL::text], ARRAY[fence]
    FROM moved
)
SELECT fence FROM moved;

-- name: cancel_waiting
-- F7, F9: what has not begun in some runs does not begin any more; nor does a map, which only waits for its items.
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
), noted AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), 'flows.step', $4, array_agg(run_id || '/' || step_id),
           array_agg(source), ARRAY[{step.CANCELLED}], ARRAY[$5], ARRAY[$3], array_agg(fence)
    FROM moved
    HAVING count(*) > 0
)
SELECT n FROM moved;

-- name: claim
-- F4: the oldest READY steps of each kind that is wanted, as many as there is room for; SKIP LOCKED lets one win.
WITH wanted AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::integer[]) AS wanted (kind, room)
), due AS MATERIALIZED (
    SELECT one.place
    FROM wanted CROSS JOIN LATERAL (
        SELECT t.ctid AS place, t.due_at, t.id
        FROM flow_step t
        WHERE t.kind = wanted.kind AND t.status = {step.READY} AND t.due_at <= $4
        ORDER BY t.due_at, t.id
        LIMIT wanted.room
        FOR UPDATE SKIP LOCKED
    ) AS one
    ORDER BY one.due_at, one.id
    LIMIT $3
), entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), held AS (
    UPDATE flow_step t
    SET status = {step.RUNNING}, fence = t.fence + 1, attempts = t.attempts + 1, worker = $5, lease_until = $6,
        started_at = $4, moves = <moves>
    -- Locked above, so found by its place alone: any other condition would have the planner read all that are READY.
    WHERE t.ctid = ANY (ARRAY(SELECT place FROM due))
    RETURNING t.*
), named AS (
    SELECT t.*, r.run_id, r.scope, r.trace
    FROM held t JOIN flow_run r ON r.id = t.run
), noted AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), 'flows.step', $4, array_agg(t.run_id || '/' || t.step_id),
           ARRAY[{step.READY}], ARRAY[{step.RUNNING}], ARRAY[$5], ARRAY[NULL::text], array_agg(t.fence)
    FROM named t
    HAVING count(*) > 0
)
-- The scope of a run comes with the first of its steps: many may be claimed at once.
SELECT run, n, kind, fence, step_id, run_id, attempts, coalesce(given, spec -> 'inputs') AS inputs,
       CASE WHEN row_number() OVER (PARTITION BY run ORDER BY due_at, id) = 1 THEN scope END AS scope, trace,
       time_limit, is_plain
FROM named ORDER BY due_at, id;

-- name: running_of_kinds
-- F16: how many steps of some kinds are under way.
SELECT t.kind, count(*) AS running
FROM flow_step t WHERE t.status = {step.RUNNING} AND t.lease_until IS NOT NULL AND t.kind = ANY ($1)
GROUP BY t.kind;

-- name: heartbeat
-- F9: which steps are still held, and whether they are to stop; the leases of those that are not are extended. A step
-- that is being settled at this moment is left alone.
WITH found AS MATERIALIZED (
    SELECT t.run, t.n, r.run_id, t.step_id, t.fence,
           r.status = {run.CANCELLED} OR r.status = {run.FAILED} AND r.fail_fast
           OR EXISTS (SELECT FROM flow_step m WHERE m.run = t.run AND m.n = t.map_n AND m.status <> {step.RUNNING})
               AS is_cancelled
    FROM unnest($1::text[], $2::text[], $3::bigint[]) AS said (run_id, step_id, fence)
    JOIN flow_run r ON r.run_id = said.run_id
    JOIN flow_step t ON t.run = r.id AND t.step_id = said.step_id
    WHERE t.fence = said.fence AND t.status = {step.RUNNING} AND t.lease_until IS NOT NULL
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

-- name: expired
-- F11: steps whose workers have not been heard of in time.
SELECT t.run, t.n FROM flow_step t
WHERE t.status = {step.RUNNING} AND t.lease_until < $1
ORDER BY t.lease_until LIMIT $2;

-- name: steps_at
-- Some steps with all that decides what becomes of them.
SELECT t.run, t.n, t.step_id, t.kind, t.status, t.fence, t.attempts, t.max_attempts, t.required, t.spec, t.given,
       t.map_n, t.lease_until, t.sealed, t.said_fence, t.said_digest, t.outputs, t.error, t.artifacts, t.depends_on,
       t.children, t.unmet, t.worker, t.needs_evaluation, t.started_at, r.run_id, r.scope, r.fail_fast, r.depth, r.trace,
       r.is_counted, r.status AS run_status,
       (SELECT m.status FROM flow_step m WHERE m.run = t.run AND m.n = t.map_n) AS map_status
FROM unnest($1::bigint[], $2::integer[]) AS s (run, n)
JOIN flow_step t ON t.run = s.run AND t.n = s.n
JOIN flow_run r ON r.id = t.run + 0;

-- name: places_of
-- Where steps are that are known by their names.
SELECT DISTINCT r.run_id, t.step_id, t.run, t.n, t.kind
FROM unnest($1::text[], $2::text[]) AS s (run_id, step_id)
JOIN flow_run r ON r.run_id = s.run_id
JOIN flow_step t ON t.run = r.id AND t.step_id = s.step_id;

-- name: seal
-- F6: from here on this report is the one that counts; nobody else gets the step while its artifacts are published.
UPDATE flow_step t SET sealed = $4, lease_until = NULL
WHERE t.run = $1 AND t.n = $2 AND t.fence = $3 AND t.status = {step.RUNNING} AND t.lease_until IS NOT NULL
RETURNING t.n;

-- name: is_sealed
-- F6: whether what a report left is still to be published.
SELECT EXISTS (SELECT FROM flow_step WHERE run = $1 AND n = $2 AND fence = $3 AND sealed IS NOT NULL);

-- name: sealed_since
-- Reports whose artifacts were not published by whoever was told them.
SELECT t.run, t.n FROM flow_step t
WHERE t.sealed IS NOT NULL AND (t.sealed ->> 'at')::timestamptz < $1
ORDER BY t.run, t.n LIMIT $2;

-- name: add_late_outputs
-- F5: what may change after a step has ended.
UPDATE flow_step t SET outputs = t.outputs || $4
WHERE t.run = $1 AND t.n = $2 AND t.fence = $3 AND t.status = {step.SUCCEEDED} AND NOT t.outputs @> $4
RETURNING t.n;

-- name: outputs_of
-- What steps of a run gave, for those who refer to them.
SELECT t.step_id, t.status, t.outputs FROM flow_step t WHERE t.run = $1 AND t.step_id = ANY ($2);

-- name: skipped_at
-- Which of some steps of a run were skipped.
SELECT t.n, t.step_id FROM flow_step t WHERE t.run = $1 AND t.n = ANY ($2) AND t.status = {step.SKIPPED};

-- name: outer_flows
-- F14: the flows a run is within, its own among them.
WITH RECURSIVE outer_run AS (
    SELECT id, flow, parent_run FROM flow_run WHERE id = $1
    UNION ALL
    SELECT r.id, r.flow, r.parent_run FROM flow_run r JOIN outer_run o ON r.id = o.parent_run
)
SELECT flow FROM outer_run WHERE flow IS NOT NULL;

-- name: items_of
-- F14: the items of a map, in order.
SELECT t.n, t.status, t.outputs FROM flow_step t WHERE t.run = $1 AND t.map_n = $2 ORDER BY t.n;

-- name: next_place
-- The first place of a run that is free, and so how many steps it has.
SELECT max(t.n) + 1 FROM flow_step t WHERE t.run = $1;

-- name: graph_of
-- All steps of a run, as far as it takes to decide which are to be opened again.
SELECT t.n, t.step_id, t.kind, t.status, t.depends_on, t.children, t.map_n, t.fence, t.reason
FROM flow_step t WHERE t.run = $1 ORDER BY t.n;

-- name: reopen
-- F10: set steps back to the beginning; what waits for them is counted anew after.
WITH entry AS MATERIALIZED (
    SELECT nextval('journal_id_seq') AS number
), before AS MATERIALIZED (
    SELECT run, n, status FROM flow_step WHERE run = $1 AND n = ANY ($2)
), moved AS (
    UPDATE flow_step t
    SET status = {step.PENDING}, attempts = 0, outputs = NULL, error = NULL, reason = NULL,
        given = CASE WHEN t.map_n IS NULL THEN NULL ELSE t.given END,  -- an item is given its inputs only once
        artifacts = NULL, finished_at = NULL, worker = NULL, due_at = $3, moves = t.moves || (SELECT number FROM entry)
    FROM flow_run r, before
    WHERE r.id = $1 AND t.run = before.run AND t.n = before.n AND t.status IN {step.reopen}
    RETURNING t.n, t.step_id, t.fence, r.run_id, before.status AS source
), noted AS (
    INSERT INTO journal (id, machine, at, subjects, sources, targets, actors, reasons, fences)
    SELECT (SELECT number FROM entry), 'flows.step', $3, array_agg(run_id || '/' || step_id), array_agg(source),
           ARRAY[{step.PENDING}], ARRAY[$4], ARRAY[$5], array_agg(fence)
    FROM moved
    HAVING count(*) > 0
)
SELECT n FROM moved;

-- name: explain_run
-- Why a run failed, in a sentence.
UPDATE flow_run SET reason = $2 WHERE id = $1;

-- name: recount
-- F3: count anew what each waiting step of a run waits for; returns those that were wrong. Steps are looked up by the run
-- of the row at hand, not by $1: else a plan made for few compares all with all.
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
-- How many steps of a run are open, and how many failed. After somebody's hand all that have not ended are counted: a
-- step nothing depends on may have ended before those it depends on.
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

-- name: standing_of
-- How far a run is: whether something of it is open, failed or under way.
SELECT r.status, r.open, r.failed FROM flow_run r WHERE r.id = $1;

-- name: ready_maps
-- Maps of a run all of whose items have ended well, though nobody ended them.
SELECT t.run, t.n FROM flow_step t
WHERE t.run = $1 AND t.status = {step.RUNNING} AND t.kind = 'map' AND t.unmet = 0;

-- name: runs_under_way
-- A page of the runs that are under way.
SELECT id FROM flow_run WHERE id > $1 AND status = {run.RUNNING} ORDER BY id LIMIT $2;

-- name: astray
-- F3: runs among some whose steps stand as no run that is advanced can stand: a step or a map waits for what is there,
-- or everything has ended.
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

-- name: run_named
-- A run by its name.
SELECT id, run_id, flow, status, digest FROM flow_run WHERE run_id = $1;

-- name: untold
-- F14: inner runs that have ended, whose steps do not know; and those still under way whose steps have ended.
SELECT r.id, r.run_id, r.parent_run, r.parent_n, r.status, r.reason
FROM flow_run r JOIN flow_step t ON t.run = r.parent_run AND t.n = r.parent_n
JOIN flow_run p ON p.id = r.parent_run
WHERE r.parent_run IS NOT NULL AND NOT r.is_told
  AND (r.status IN {run.ended} OR t.status <> {step.RUNNING}
       OR p.status = {run.CANCELLED} OR p.status = {run.FAILED} AND p.fail_fast)
ORDER BY r.id LIMIT $1;

-- name: tell
-- F14: the step of an inner run knows how it ended.
UPDATE flow_run SET is_told = true WHERE id = $1 AND NOT is_told;

-- name: last_outputs
-- What the last steps of a run gave.
SELECT t.step_id, t.outputs FROM flow_step t
WHERE t.run = $1 AND t.children = '{}' AND t.map_n IS NULL AND t.status = {step.SUCCEEDED} ORDER BY t.n;

-- name: count_active
-- F16: how many runs of a flow are under way.
SELECT count(*) FROM flow_run WHERE flow = $1 AND status = {run.RUNNING};

-- name: waiting_runs
-- F16: the runs of a flow that wait to begin, oldest first.
SELECT id FROM flow_run WHERE flow = $1 AND status = {run.PENDING} ORDER BY id LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED;

-- name: waiting_flows
-- F16: flows with runs that wait to begin.
SELECT DISTINCT flow FROM flow_run WHERE status = {run.PENDING} AND flow IS NOT NULL;

-- name: insert_logs
-- F18: lines of attempts that hold their steps, or held them.
INSERT INTO flow_log (run, n, fence, attempt, at, level, message)
SELECT t.run, t.n, s.fence, t.attempts, $6, s.level, s.message
FROM unnest($1::text[], $2::text[], $3::bigint[], $4::text[], $5::text[]) AS s (run_id, step_id, fence, level, message)
JOIN flow_run r ON r.run_id = s.run_id
JOIN flow_step t ON t.run = r.id AND t.step_id = s.step_id AND t.fence = s.fence
WHERE NOT EXISTS (SELECT FROM flow_log l WHERE l.run = t.run AND l.n = t.n OFFSET $7::integer - 1)
RETURNING id;

-- name: old_runs
-- Some runs that ended long ago, and that no other run needs.
SELECT r.id, r.run_id FROM flow_run r
WHERE r.finished_at < $1 AND r.status IN {run.ended}
  AND NOT EXISTS (SELECT FROM flow_run later WHERE later.resumed_from = r.id)
ORDER BY r.finished_at LIMIT $2;

-- name: prune_runs
-- Forget runs with their steps, unless they were taken up again meanwhile.
WITH forgotten AS (
    DELETE FROM flow_run WHERE id = ANY ($1) AND finished_at < $2 AND status IN {run.ended} RETURNING id
)
DELETE FROM flow_step WHERE run = ANY (ARRAY(SELECT id FROM forgotten));

-- name: run_document
-- F1: a run with all that is told of it.
SELECT id, run_id, flow, status, scope, digest, fail_fast, reason, open, failed, parent_run, scheduled_for, trace,
       created_by, created_at, started_at, finished_at, moves
FROM flow_run WHERE id = $1;

-- name: steps_document
-- F1: the steps of a run with all that is told of them.
SELECT n, step_id, kind, status, depends_on, unmet, required, spec, given, map_n, outputs, error, reason, artifacts,
       fence, attempts, max_attempts, worker, lease_until, due_at, started_at, finished_at, moves, sealed
FROM flow_step WHERE run = $1 ORDER BY n;

-- name: begin_schedule
-- F16: a schedule that is new is kept from now on.
INSERT INTO flow_schedule (flow, kept_until) VALUES ($1, $2) ON CONFLICT (flow) DO NOTHING;

-- name: schedule_of
-- F16: up to when the schedule of a flow has been kept.
SELECT kept_until, is_paused, last_run FROM flow_schedule WHERE flow = $1;

-- name: schedule_kept
-- F16: up to when a schedule has been kept, and by which run.
UPDATE flow_schedule SET kept_until = greatest(kept_until, $2), last_run = coalesce($3, last_run), note = $4 WHERE flow = $1;

-- name: pause_schedule
-- F16: keep a schedule, or not for the time being. What passed meanwhile is not caught up.
INSERT INTO flow_schedule (flow, kept_until, is_paused) VALUES ($1, $2, $3)
ON CONFLICT (flow) DO UPDATE SET is_paused = $3, kept_until = greatest(flow_schedule.kept_until, $2);

-- name: is_active
-- Whether a run is still under way.
SELECT EXISTS (SELECT FROM flow_run WHERE run_id = $1 AND status IN {run.active});

-- name: ready_by_kind
-- F18: how many steps wait for a worker, and how long the oldest does.
SELECT t.kind, count(*), greatest(0, extract(epoch FROM $1 - min(t.due_at)))::float8
FROM flow_step t WHERE t.status = {step.READY} GROUP BY t.kind ORDER BY count(*) DESC LIMIT 200;

-- name: active_runs
-- F18: how many runs are under way.
SELECT r.status, count(*) FROM flow_run r WHERE r.status IN {run.active} GROUP BY r.status;
