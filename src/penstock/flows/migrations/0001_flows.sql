-- Runs of flows, and their steps. The key of a step is its run and its index `n` in the run.

CREATE TABLE flow_run (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run_id text COLLATE "C" NOT NULL UNIQUE,
    flow text COLLATE "C",                     -- null: the steps were defined in the request
    status text NOT NULL CHECK (status IN ('PENDING', 'RUNNING', 'SUCCEEDED', 'FAILED', 'CANCELLED')),
    scope jsonb NOT NULL,
    digest text NOT NULL,                      -- F2: of the request, to recognise a repeated request
    fail_fast boolean NOT NULL,
    reason text,                               -- why it failed or was cancelled
    open integer NOT NULL CHECK (open >= 0),   -- steps without children that have not ended
    is_counted boolean NOT NULL DEFAULT false, -- after a skip or a retry: `open` counts all steps that have not ended
    failed integer NOT NULL DEFAULT 0 CHECK (failed >= 0),
    parent_run bigint,                         -- F14: the step that started this sub-run
    parent_n integer,
    depth integer NOT NULL DEFAULT 0,
    is_reported boolean NOT NULL DEFAULT false, -- whether the end is reported to that step
    scheduled_for timestamptz,                 -- F16
    resumed_from bigint,                       -- F19: the run whose artifacts this run uses; retained as long as this run
    trace text,
    created_by text NOT NULL,
    created_at timestamptz NOT NULL,
    started_at timestamptz,
    finished_at timestamptz,
    moves bigint[] NOT NULL DEFAULT '{}'       -- the ids of its journal entries
) WITH (fillfactor = 70);
CREATE INDEX flow_run_active ON flow_run (flow, id) WHERE status IN ('PENDING', 'RUNNING');
CREATE INDEX flow_run_waiting ON flow_run (flow, id) WHERE status = 'PENDING';
CREATE INDEX flow_run_by_flow ON flow_run (flow, id DESC);
CREATE INDEX flow_run_parent ON flow_run (parent_run, parent_n) WHERE parent_run IS NOT NULL;
CREATE INDEX flow_run_unreported ON flow_run (id) WHERE parent_run IS NOT NULL AND NOT is_reported;
CREATE INDEX flow_run_resumed ON flow_run (resumed_from) WHERE resumed_from IS NOT NULL;
CREATE INDEX flow_run_finished ON flow_run (finished_at) WHERE finished_at IS NOT NULL;

CREATE TABLE flow_step (
    run bigint NOT NULL,                       -- no foreign key: it would be checked for every step of every new run
    n integer NOT NULL,
    id bigint GENERATED ALWAYS AS IDENTITY,    -- in order of insertion
    step_id text COLLATE "C" NOT NULL,
    kind text COLLATE "C" NOT NULL,
    status text NOT NULL CHECK (status IN (
        'PENDING', 'READY', 'RUNNING', 'SUCCEEDED', 'FAILED', 'SKIPPED', 'CANCELLED')),
    depends_on integer[] NOT NULL,
    children integer[] NOT NULL,               -- the indexes of the steps that depend on it, never changed
    unmet integer NOT NULL,                    -- F3: the number of unsatisfied dependencies, or of unsatisfied items of a map
    needs_evaluation boolean NOT NULL,         -- a condition, a reference or an engine kind is evaluated before it is READY
    is_plain boolean NOT NULL,                 -- its success has no effect except on the counters of its children
    required boolean NOT NULL,
    spec jsonb NOT NULL,                       -- as written in the flow
    resolved_inputs jsonb,                     -- the inputs with all references resolved; null: as written in spec
    map_n integer,                             -- F14: the index of its map, for an item
    outputs jsonb,
    error jsonb,
    reason text,                               -- why it was skipped or cancelled
    artifacts jsonb,                           -- F6
    sealed jsonb,                              -- F6: the accepted report, while its artifacts are published
    reported_fence bigint,                     -- F5: of the last accepted report, to recognise a repeated report
    reported_digest text,
    fence bigint NOT NULL DEFAULT 0,
    attempts integer NOT NULL DEFAULT 0,
    max_attempts integer,                      -- F10; null: errors are final, and flows.max_lost limits lost leases
    time_limit interval,
    worker text,
    lease_until timestamptz,
    due_at timestamptz NOT NULL,
    started_at timestamptz,                    -- of the last attempt
    finished_at timestamptz,
    moves bigint[] NOT NULL DEFAULT '{}',
    PRIMARY KEY (run, n),
    UNIQUE (step_id, run)                      -- in this order: a plan for a small table must not find steps by run alone
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);
CREATE INDEX flow_step_ready ON flow_step (kind, due_at, id) WHERE status = 'READY';
CREATE INDEX flow_step_lease ON flow_step (lease_until) WHERE status = 'RUNNING';
CREATE INDEX flow_step_items ON flow_step (run, map_n, n) WHERE map_n IS NOT NULL;
CREATE INDEX flow_step_sealed ON flow_step (run, n) WHERE sealed IS NOT NULL;

-- F18: log lines of steps.
CREATE TABLE flow_log (
    id bigint GENERATED ALWAYS AS IDENTITY,
    run bigint NOT NULL REFERENCES flow_run (id) ON DELETE CASCADE,
    n integer NOT NULL,
    fence bigint NOT NULL,
    attempt integer NOT NULL,
    at timestamptz NOT NULL,
    level text NOT NULL,
    message text NOT NULL,
    PRIMARY KEY (run, n, id)
);

-- F16: the time up to which the schedule of a flow has been evaluated.
CREATE TABLE flow_schedule (
    flow text COLLATE "C" PRIMARY KEY,
    evaluated_until timestamptz NOT NULL,
    is_paused boolean NOT NULL DEFAULT false,
    last_run text COLLATE "C",
    note text                                  -- the reason why the last time started no run
);
