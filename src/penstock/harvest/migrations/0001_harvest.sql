-- Runs over paged APIs: planned, fetched by partition, consolidated, watermarked. The first three tables are the founding
-- document's, with what else is needed after its columns.

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
    heatmap jsonb NOT NULL,                    -- H3: the proof that the parts are the whole
    pricing_version integer,                   -- H7: the rules it used, once it consolidates
    forced_by text,                            -- H5: who had it consolidated in spite of failures, and why
    forced_because text,
    error text,                                -- why it failed
    consolidated bigint NOT NULL DEFAULT 0,
    rejected bigint NOT NULL DEFAULT 0,
    deleted bigint,                            -- H10: null where nothing was looked for
    touched_at timestamptz NOT NULL,           -- when something was last done for it
    rescues integer NOT NULL DEFAULT 0,        -- how often a message had to be sent again for it
    moves bigint[] NOT NULL DEFAULT '{}',      -- the numbers of its entries in the journal
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
    worker_id text NOT NULL,                   -- who worked on it last
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
    lower_bound bigint,                        -- H3: at least this, and
    upper_bound bigint,                        -- below this, in minor units
    counted integer NOT NULL,                  -- by the source, when this pass began
    next_cursor text,                          -- where the source goes by cursors
    scan integer NOT NULL DEFAULT 1,           -- H16: the pass under way
    scan_started_at timestamptz NOT NULL,
    last_scan_at timestamptz,                  -- when the pass before it began
    told integer NOT NULL DEFAULT 0,           -- records the source gave in this pass, each time it did
    seen integer NOT NULL DEFAULT 0,           -- records of this pass, each counted once; also those set aside
    missed integer NOT NULL DEFAULT 0,         -- of these, records an earlier pass should have seen
    was_clean boolean NOT NULL DEFAULT false,  -- whether the pass before it found nothing that an earlier one had missed
    rescues integer NOT NULL DEFAULT 0,        -- how often its message had to be sent again
    waits_until timestamptz,                   -- its source asked for a pause: no message is on the way until then
    PRIMARY KEY (run_id, partition_id)
) WITH (fillfactor = 70);
CREATE INDEX partition_progress_waits ON partition_progress (waits_until) WHERE waits_until IS NOT NULL;

-- A run before it is one: asked for, and its source being counted.
CREATE TABLE harvest_plan (
    run_id uuid PRIMARY KEY,
    feed text COLLATE "C" NOT NULL,
    run_type text CHECK (run_type IN ('full')),  -- as asked for; null: as the watermark says
    state text NOT NULL CHECK (state IN ('planning', 'planned', 'failed')),
    requested_by text NOT NULL,
    requested_at timestamptz NOT NULL,
    counts integer NOT NULL DEFAULT 0,         -- how often the source was asked until now
    touched_at timestamptz NOT NULL,
    rescues integer NOT NULL DEFAULT 0,
    error text,
    trace_id text NOT NULL,
    moves bigint[] NOT NULL DEFAULT '{}'
);
CREATE UNIQUE INDEX harvest_plan_active ON harvest_plan (feed) WHERE state = 'planning';
CREATE INDEX harvest_plan_latest ON harvest_plan (requested_at DESC, run_id DESC);
CREATE INDEX harvest_plan_of_feed ON harvest_plan (feed, requested_at DESC, run_id DESC);

-- Every run, also one that is being planned or could not be; `status` is as the founding document computes it.
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
    r.forced_by, r.forced_because, coalesce(r.error, p.error) AS error, r.deleted,
    (r.heatmap ->> 'total')::bigint AS counted,
    (SELECT coalesce(sum(seen), 0) FROM partition_progress s WHERE s.run_id = p.run_id) AS records,
    coalesce(r.consolidated, 0) AS consolidated,
    coalesce(r.rejected, 0) AS rejected,
    extract(epoch FROM coalesce(r.completed_at, now()) - r.started_at) / 60 AS duration_minutes,
    p.moves || coalesce(r.moves, '{}') AS moves
FROM harvest_plan p
LEFT JOIN run_metadata r USING (run_id);

-- H15: what all processes that call a source have to agree on, and H8: up to when it is known.
CREATE TABLE harvest_feed (
    feed text COLLATE "C" PRIMARY KEY,
    watermark timestamptz,
    watermark_run uuid,
    watermark_at timestamptz,                  -- when that run completed
    recipe text,                               -- what the canonical records were last made with
    next_slot timestamptz,                     -- under a rate: when the next request may go
    paused_until timestamptz,
    paused_because text,
    failures integer NOT NULL DEFAULT 0,       -- in a row
    breaks integer NOT NULL DEFAULT 0,         -- in a row
    probed_at timestamptz                      -- when one request was let through to see whether it is over
) WITH (fillfactor = 50);

CREATE TABLE harvest_watermark (
    feed text COLLATE "C" NOT NULL,
    run_id uuid NOT NULL,
    last_updated_at timestamptz NOT NULL,
    run_completed_at timestamptz NOT NULL,
    PRIMARY KEY (feed, run_id)
);

-- What the source told, as it told it.
CREATE TABLE raw_record (
    feed text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    payload jsonb NOT NULL,
    source_updated_at timestamptz,
    version bigint NOT NULL,                   -- grows with every change
    seen_run uuid NOT NULL,
    seen_in text NOT NULL,
    seen_scan integer NOT NULL,
    is_gone boolean NOT NULL DEFAULT false,    -- H10
    changed_at timestamptz NOT NULL,
    PRIMARY KEY (feed, key)
) WITH (fillfactor = 80);

-- H7: which raw records are not consolidated, and as of which version.
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
    rule text,                                 -- the one that made the price
    pricing_version integer NOT NULL,
    run_id uuid NOT NULL,                      -- that consolidated it last
    version bigint NOT NULL,                   -- of the raw record it was made of
    changed_at timestamptz NOT NULL,
    deleted_at timestamptz,
    PRIMARY KEY (feed, key)
) WITH (fillfactor = 90);

-- Records that could not be kept or mapped, and why.
CREATE TABLE harvest_reject (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run_id uuid NOT NULL,
    feed text COLLATE "C" NOT NULL,
    key text,
    reason text NOT NULL,
    payload text,
    rejected_at timestamptz NOT NULL
);
CREATE INDEX harvest_reject_of_run ON harvest_reject (run_id, id);

-- H7: every set of rules there was.
CREATE TABLE harvest_pricing (
    feed text COLLATE "C" NOT NULL,
    version integer NOT NULL,
    rules jsonb NOT NULL,
    digest text NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (feed, version)
);

-- H12: what somebody has to be told of. Written in the transaction that made it so.
CREATE TABLE harvest_alert (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    feed text COLLATE "C" NOT NULL,
    run_id uuid,
    code text NOT NULL,
    severity text NOT NULL CHECK (severity IN ('WARNING', 'ERROR', 'CRITICAL')),
    message text NOT NULL,
    raised_at timestamptz NOT NULL,
    told text[] NOT NULL DEFAULT '{}',         -- the channels that took it
    attempts integer NOT NULL DEFAULT 0,
    due_at timestamptz NOT NULL,
    error text,
    is_told boolean NOT NULL DEFAULT false     -- or given up
);
CREATE INDEX harvest_alert_due ON harvest_alert (due_at) WHERE NOT is_told;
CREATE INDEX harvest_alert_latest ON harvest_alert (feed, id DESC);
