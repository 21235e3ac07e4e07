-- Runs of flows, and their steps. A step is known by its run and its place in it.

CREATE TABLE flow_run (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run_id text COLLATE "C" NOT NULL UNIQUE,
    flow text COLLATE "C",                     -- null: its steps were given inline
    status text NOT NULL CHECK (status IN ('PENDING', 'RUNNING', 'SUCCEEDED', 'FAILED', 'CANCELLED')),
    scope jsonb NOT NULL,
    digest text NOT NULL,                      -- F2: of what it was made of, to know the same request again
    fail_fast boolean NOT NULL,
    reason text,                               -- why it failed or was cancelled
    open integer NOT NULL CHECK (open >= 0),   -- steps that have not ended among those nothing depends on
    is_counted boolean NOT NULL DEFAULT false, -- somebody skipped or retried: `open` are all steps that have not ended
    failed integer NOT NULL DEFAULT 0 CHECK (failed >= 0),
    parent_run bigint,                         -- F14: the step this run is the inside of
    parent_n integer,
    depth integer NOT NULL DEFAULT 0,
    is_told boolean NOT NULL DEFAULT false,    -- whether that step knows of the end
    scheduled_for timestamptz,                 -- F16
    resumed_from bigint,                       -- F19: the run whose artifacts it points at: kept as long as this one
    trace text,
    created_by text NOT NULL,
    created_at timestamptz NOT NULL,
    started_at timestamptz,
    finished_at timestamptz,
    moves bigint[] NOT NULL DEFAULT '{}'       -- the numbers of its entries in the journal
) WITH (fillfactor = 70);
CREATE INDEX flow_run_active ON flow_run (flow, id) WHERE status IN ('PENDING', 'RUNNING');
CREATE INDEX flow_run_waiting ON flow_run (flow, id) WHERE status = 'PENDING';
CREATE INDEX flow_run_by_flow ON flow_run (flow, id DESC);
CREATE INDEX flow_run_inside ON flow_run (parent_run, parent_n) WHERE parent_run IS NOT NULL;
CREATE INDEX flow_run_untold ON flow_run (id) WHERE parent_run IS NOT NULL AND NOT is_told;
CREATE INDEX flow_run_resumed ON flow_run (resumed_from) WHERE resumed_from IS NOT NULL;
CREATE INDEX flow_run_finished ON flow_run (finished_at) WHERE finished_at IS NOT NULL;

CREATE TABLE flow_step (
    run bigint NOT NULL,                       -- no foreign key: it would be looked up for every step of every run made
    n integer NOT NULL,
    id bigint GENERATED ALWAYS AS IDENTITY,    -- in order of arrival
    step_id text COLLATE "C" NOT NULL,
    kind text COLLATE "C" NOT NULL,
    status text NOT NULL CHECK (status IN (
        'PENDING', 'READY', 'RUNNING', 'SUCCEEDED', 'FAILED', 'SKIPPED', 'CANCELLED')),
    depends_on integer[] NOT NULL,
    children integer[] NOT NULL,               -- the places of the steps that depend on it, never changed
    unmet integer NOT NULL,                    -- F3: of those it depends on, how many are not satisfied; of a map's items too
    needs_evaluation boolean NOT NULL,             -- a condition, a reference or an engine's kind is judged before it is READY
    is_plain boolean NOT NULL,                 -- from its success follows nothing but its children's turn
    required boolean NOT NULL,
    spec jsonb NOT NULL,                       -- as it was written
    given jsonb,                               -- its inputs with all references filled in; null: as written
    map_n integer,                             -- F14: the map it is an item of
    outputs jsonb,
    error jsonb,
    reason text,                               -- why it was skipped or cancelled
    artifacts jsonb,                           -- F6
    sealed jsonb,                              -- F6: the report that counts, while its artifacts are being published
    said_fence bigint,                         -- F5: the last report that was believed, to know it again
    said_digest text,
    fence bigint NOT NULL DEFAULT 0,
    attempts integer NOT NULL DEFAULT 0,
    max_attempts integer,                      -- F10; null: its errors are final, and lost leases are forgiven for a while
    time_limit interval,
    worker text,
    lease_until timestamptz,
    due_at timestamptz NOT NULL,
    started_at timestamptz,                    -- of the last attempt
    finished_at timestamptz,
    moves bigint[] NOT NULL DEFAULT '{}',
    PRIMARY KEY (run, n),
    UNIQUE (step_id, run)                      -- in this order: a plan made while a table is small must not look steps up by run alone
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);
CREATE INDEX flow_step_ready ON flow_step (kind, due_at, id) WHERE status = 'READY';
CREATE INDEX flow_step_held ON flow_step (lease_until) WHERE status = 'RUNNING';
CREATE INDEX flow_step_items ON flow_step (run, map_n, n) WHERE map_n IS NOT NULL;
CREATE INDEX flow_step_sealed ON flow_step (run, n) WHERE sealed IS NOT NULL;

-- F18: what steps told while they ran.
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

-- F16: up to when the schedule of a flow has been kept.
CREATE TABLE flow_schedule (
    flow text COLLATE "C" PRIMARY KEY,
    kept_until timestamptz NOT NULL,
    is_paused boolean NOT NULL DEFAULT false,
    last_run text COLLATE "C",
    note text                                  -- why the last time passed without a run
);
