-- The service tables of the founding document, §9. Columns that it does not name follow after "beyond the document".

CREATE TABLE dictionary_meta (
    tenant_id text NOT NULL,
    dict_code text NOT NULL,
    version bigint NOT NULL,
    last_source_revision bigint,
    updated_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, dict_code)
) WITH (fillfactor = 50);
CREATE INDEX dictionary_meta_dict_code ON dictionary_meta (dict_code, tenant_id);

-- The items of dictionaries that have no tables of their own.
CREATE TABLE dictionary_item (
    tenant_id text NOT NULL,
    dict_code text NOT NULL,
    item_key text NOT NULL,
    payload jsonb NOT NULL,
    deleted boolean NOT NULL DEFAULT false,
    updated_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, dict_code, item_key)
) WITH (fillfactor = 90);
-- Without updated_at, so that updates of an item can be heap-only (HOT).
CREATE INDEX dictionary_item_tombstone ON dictionary_item (dict_code) WHERE deleted;

-- Events that were applied or refused, so that each is processed only once.
CREATE TABLE processed_event (
    tenant_id text NOT NULL,
    event_id uuid NOT NULL,
    source text NOT NULL,
    processed_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, event_id)
);
CREATE INDEX processed_event_age ON processed_event USING brin (processed_at) WITH (autosummarize = on);

CREATE TABLE update_request (
    tenant_id text NOT NULL,
    event_id uuid NOT NULL,
    dict_code text NOT NULL,
    status text NOT NULL CHECK (status IN ('PENDING', 'COMMITTED', 'FAILED')),
    committed_version bigint,
    error_message text,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    -- beyond the document
    error_code text,
    body_hash bytea,            -- of the command sent with this event id, if it is known
    probed_at timestamptz,  -- time of the last give-up message for it
    PRIMARY KEY (tenant_id, event_id)
);
CREATE INDEX update_request_pending ON update_request (created_at) WHERE status = 'PENDING';
CREATE INDEX update_request_failed ON update_request (tenant_id, updated_at, event_id) WHERE status = 'FAILED';
CREATE INDEX update_request_age ON update_request USING brin (updated_at) WITH (autosummarize = on);

-- The invalidations for the pods, and the history of every dictionary.
CREATE TABLE outbox_event (
    id bigserial PRIMARY KEY,
    tenant_id text NOT NULL,
    event_id uuid NOT NULL,
    dict_code text NOT NULL,
    version bigint NOT NULL,
    payload jsonb NOT NULL,
    created_at timestamptz NOT NULL,
    published boolean NOT NULL DEFAULT false,
    -- beyond the document
    event_type text NOT NULL,
    source text NOT NULL,
    items integer NOT NULL,
    source_revision bigint
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);
CREATE INDEX outbox_event_waiting ON outbox_event (id) WHERE NOT published;
CREATE UNIQUE INDEX outbox_event_version ON outbox_event (tenant_id, dict_code, version);

-- Snapshots that are sent in chunks.
CREATE TABLE snapshot_set (
    tenant_id text NOT NULL,
    dict_code text NOT NULL,
    snapshot_id uuid NOT NULL,
    status text NOT NULL CHECK (status IN ('OPEN', 'COMMITTED', 'FAILED')),
    chunks_total integer NOT NULL,
    source_revision bigint,
    committed_version bigint,
    error_code text,
    error_message text,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, dict_code, snapshot_id)
);
CREATE INDEX snapshot_set_open ON snapshot_set (updated_at) WHERE status = 'OPEN';

CREATE TABLE snapshot_chunk (
    tenant_id text NOT NULL,
    dict_code text NOT NULL,
    snapshot_id uuid NOT NULL,
    chunk_index integer NOT NULL,
    item_count integer NOT NULL,
    content_hash bytea NOT NULL,
    items bytea,                -- NULL after the snapshot has ended
    PRIMARY KEY (tenant_id, dict_code, snapshot_id, chunk_index)
);
ALTER TABLE snapshot_chunk ALTER COLUMN items SET STORAGE EXTERNAL;  -- read once and deleted: compression does not pay

CREATE TABLE snapshot_event (
    tenant_id text NOT NULL,
    dict_code text NOT NULL,
    snapshot_id uuid NOT NULL,
    event_id uuid NOT NULL,
    PRIMARY KEY (tenant_id, dict_code, snapshot_id, event_id)
);

-- The last value of each driftCheckSql, and the changes of that value without a new version.
CREATE TABLE drift_check (
    tenant_id text NOT NULL,
    dict_code text NOT NULL,
    check_hash text NOT NULL,           -- of driftCheckSql
    version bigint NOT NULL,
    value text,
    expected text,                      -- the value before the first unresolved change
    drifts integer NOT NULL DEFAULT 0,  -- unresolved changes
    drifted_at timestamptz,             -- time of the last one
    PRIMARY KEY (tenant_id, dict_code)
);

-- The hash of the last loadSql of each dictionary: a different loadSql makes a new version.
CREATE TABLE dictionary_definition (
    dict_code text PRIMARY KEY,
    load_hash text NOT NULL,
    updated_at timestamptz NOT NULL
);
