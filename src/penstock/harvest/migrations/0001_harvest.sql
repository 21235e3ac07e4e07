-- Runs over paged APIs: plan, fetch by partition, consolidate, move the watermark. The first three tables have the columns
-- of the founding document first, followed by the columns that Penstock adds.

CREATE TABLE run_metadata (
    run_id uuid PRIMARY KEY,
    run_type text NOT NULL CHECK (run_type IN ('full', 'incremental')),
    expected_workers integer NOT NULL CHECK (expected_workers > 0),
    completed_workers integer NOT NULL DEFAULT 0,
    failed_workers integer NOT NULL DEFAULT 0,
    watermark_before timestamptz,
    watermark_after timestamptz,
    started_at timestamptz NOT NULL DEFAULT now(),
    completed_at timestamptz,
    feed text COLLATE "C" NOT NULL,
    state text NOT NULL CHECK (state IN (
        'created', 'workers_running', 'consolidation_skipped', 'consolidating', 'completed', 'failed')),
    upper_bound timestamptz NOT NULL,          -- H9: fixed before the source is counted
    trace_id text NOT NULL,
    requested_by text NOT NULL,
    heatmap jsonb NOT NULL,                    -- H3: counts of the partitions and of the source
    pricing_version integer,                   -- H7: the pricing rules, known from consolidation on
    forced_by text,                            -- H5: the actor and the reason of a forced consolidation
    force_reason text,
    error text,                                -- of a failed run
    consolidated bigint NOT NULL DEFAULT 0,
    rejected bigint NOT NULL DEFAULT 0,
    deleted bigint,                            -- H10: null for an incremental run
    touched_at timestamptz NOT NULL,           -- time of the last progress
    rescues integer NOT NULL DEFAULT 0,        -- messages that were sent again after a stall
    moves bigint[] NOT NULL DEFAULT '{}',      -- ids of the journal entries
    CHECK (completed_workers >= 0 AND failed_workers >= 0 AND completed_workers + failed_workers <= expected_workers),
    CHECK ((state = 'completed') = (completed_at IS NOT NULL)),
    CHECK (watermark_after IS NULL OR completed_at IS NOT NULL)
);
CREATE UNIQUE INDEX run_metadata_active ON run_metadata (feed)
    WHERE state IN ('created', 'workers_running', 'consolidating');
CREATE INDEX run_metadata_latest ON run_metadata (feed, started_at DESC, run_id DESC);
CREATE INDEX run_metadata_started ON run_metadata (started_at DESC, run_id DESC);

CREATE TABLE worker_runs (
    id uuid PRIMARY KEY,
    run_id uuid NOT NULL REFERENCES run_metadata (run_id) ON DELETE CASCADE,
    partition_id text NOT NULL,
    worker_id text NOT NULL,                   -- the last worker
    status text NOT NULL CHECK (status IN ('running', 'completed', 'failed')),
    records_processed integer NOT NULL DEFAULT 0,
    error_message text,
    work_item_payload jsonb,
    started_at timestamptz NOT NULL DEFAULT now(),
    completed_at timestamptz,
    UNIQUE (run_id, partition_id)
) WITH (fillfactor = 70);

CREATE TABLE partition_progress (
    run_id uuid NOT NULL REFERENCES run_metadata (run_id) ON DELETE CASCADE,
    partition_id text NOT NULL,
    next_offset integer NOT NULL DEFAULT 0,
    completed boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    kind text NOT NULL CHECK (kind IN ('all', 'range', 'null')),
    lower_bound bigint,                        -- H3: inclusive, in minor units
    upper_bound bigint,                        -- exclusive
    counted integer NOT NULL,                  -- by the source, at the start of this pass
    next_cursor text,                          -- only of a source with cursors
    scan integer NOT NULL DEFAULT 1,           -- H16: the number of the current pass
    scan_started_at timestamptz NOT NULL,
    last_scan_at timestamptz,                  -- start of the previous pass
    received integer NOT NULL DEFAULT 0,       -- records received in this pass, with duplicates
    seen integer NOT NULL DEFAULT 0,           -- distinct records of this pass, with rejected ones
    missed integer NOT NULL DEFAULT 0,         -- of these, records that an earlier pass should have seen
    was_clean boolean NOT NULL DEFAULT false,  -- whether the previous pass missed nothing
    rescues integer NOT NULL DEFAULT 0,        -- messages that were sent again after a stall
    paused_until timestamptz,                  -- the source requested a pause; no message exists until then
    PRIMARY KEY (run_id, partition_id)
) WITH (fillfactor = 70);
CREATE INDEX partition_progress_paused ON partition_progress (paused_until) WHERE paused_until IS NOT NULL;

-- A requested run. While the source is counted there is no row in run_metadata yet.
CREATE TABLE harvest_plan (
    run_id uuid PRIMARY KEY,
    feed text COLLATE "C" NOT NULL,
    run_type text CHECK (run_type IN ('full')),  -- null: chosen by the watermark
    state text NOT NULL CHECK (state IN ('planning', 'planned', 'failed')),
    requested_by text NOT NULL,
    requested_at timestamptz NOT NULL,
    counts integer NOT NULL DEFAULT 0,         -- count requests to the source
    touched_at timestamptz NOT NULL,
    rescues integer NOT NULL DEFAULT 0,
    error text,
    trace_id text NOT NULL,
    moves bigint[] NOT NULL DEFAULT '{}'
);
CREATE UNIQUE INDEX harvest_plan_active ON harvest_plan (feed) WHERE state = 'planning';
CREATE INDEX harvest_plan_latest ON harvest_plan (requested_at DESC, run_id DESC);
CREATE INDEX harvest_plan_feed ON harvest_plan (feed, requested_at DESC, run_id DESC);

-- Every run, including planned and unplannable runs. `status` is computed as in the founding document.
CREATE VIEW harvest_run AS
SELECT
    p.run_id,
    p.feed,
    coalesce(r.run_type, p.run_type) AS run_type,
    coalesce(r.state, p.state) AS state,
    CASE
        WHEN r.run_id IS NULL THEN p.state
        WHEN r.completed_at IS NOT NULL THEN 'completed'
        WHEN r.failed_workers > 0 THEN 'failed'
        WHEN r.completed_workers < r.expected_workers THEN 'in_progress'
        ELSE 'consolidating'
    END AS status,
    r.expected_workers, r.completed_workers, r.failed_workers, r.watermark_before, r.watermark_after, r.upper_bound,
    p.requested_by, p.requested_at, r.started_at, r.completed_at, p.trace_id, p.counts, r.pricing_version,
    r.forced_by, r.force_reason, coalesce(r.error, p.error) AS error, r.deleted,
    (r.heatmap ->> 'total')::bigint AS counted,
    (SELECT coalesce(sum(seen), 0) FROM partition_progress s WHERE s.run_id = p.run_id) AS records,
    coalesce(r.consolidated, 0) AS consolidated,
    coalesce(r.rejected, 0) AS rejected,
    extract(epoch FROM coalesce(r.completed_at, now()) - r.started_at) / 60 AS duration_minutes,
    p.moves || coalesce(r.moves, '{}') AS moves
FROM harvest_plan p
LEFT JOIN run_metadata r USING (run_id);

-- H15: the rate limit and the circuit breaker, shared by all processes that call a source; H8: the watermark.
CREATE TABLE harvest_feed (
    feed text COLLATE "C" PRIMARY KEY,
    watermark timestamptz,
    watermark_run uuid,
    watermark_at timestamptz,                  -- completion time of that run
    mapping text,                              -- digest of the mapping that made the canonical records
    next_slot timestamptz,                     -- under a rate: the earliest time of the next request
    paused_until timestamptz,
    pause_reason text,
    failures integer NOT NULL DEFAULT 0,       -- in a row
    breaks integer NOT NULL DEFAULT 0,         -- in a row
    probed_at timestamptz                      -- start of the probe request of an open breaker
) WITH (fillfactor = 50);

CREATE TABLE harvest_watermark (
    feed text COLLATE "C" NOT NULL,
    run_id uuid NOT NULL,
    last_updated_at timestamptz NOT NULL,
    run_completed_at timestamptz NOT NULL,
    PRIMARY KEY (feed, run_id)
);

-- Records as the source sent them.
CREATE TABLE raw_record (
    feed text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    payload jsonb NOT NULL,
    source_updated_at timestamptz,
    version bigint NOT NULL,                   -- grows with every change
    seen_run uuid NOT NULL,
    seen_in text NOT NULL,
    seen_scan integer NOT NULL,
    is_deleted boolean NOT NULL DEFAULT false, -- H10
    changed_at timestamptz NOT NULL,
    PRIMARY KEY (feed, key)
) WITH (fillfactor = 80);

-- H7: raw records that wait for consolidation, with their version.
CREATE TABLE raw_pending (
    feed text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    version bigint NOT NULL,
    PRIMARY KEY (feed, key)
);

CREATE TABLE canonical_record (
    feed text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    fields jsonb NOT NULL,
    cost numeric,
    price numeric,
    rule text,                                 -- name of the pricing rule
    pricing_version integer NOT NULL,
    run_id uuid NOT NULL,                      -- the run that consolidated it last
    version bigint NOT NULL,                   -- version of the raw record
    changed_at timestamptz NOT NULL,
    deleted_at timestamptz,
    PRIMARY KEY (feed, key)
) WITH (fillfactor = 90);

-- Records that could not be stored or mapped, with the reason.
CREATE TABLE harvest_reject (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run_id uuid NOT NULL,
    feed text COLLATE "C" NOT NULL,
    key text,
    reason text NOT NULL,
    payload text,
    rejected_at timestamptz NOT NULL
);
CREATE INDEX harvest_reject_run ON harvest_reject (run_id, id);

-- H7: all versions of the pricing rules.
CREATE TABLE harvest_pricing (
    feed text COLLATE "C" NOT NULL,
    version integer NOT NULL,
    rules jsonb NOT NULL,
    digest text NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (feed, version)
);

-- H12: alerts, inserted in the transaction of their cause.
CREATE TABLE harvest_alert (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    feed text COLLATE "C" NOT NULL,
    run_id uuid,
    code text NOT NULL,
    severity text NOT NULL CHECK (severity IN ('WARNING', 'ERROR', 'CRITICAL')),
    message text NOT NULL,
    raised_at timestamptz NOT NULL,
    delivered_to text[] NOT NULL DEFAULT '{}', -- channels that accepted the alert
    attempts integer NOT NULL DEFAULT 0,
    due_at timestamptz NOT NULL,
    error text,
    is_settled boolean NOT NULL DEFAULT false  -- accepted by all channels, or given up
);
CREATE INDEX harvest_alert_due ON harvest_alert (due_at) WHERE NOT is_settled;
CREATE INDEX harvest_alert_latest ON harvest_alert (feed, id DESC);
