-- The tables of the pipeline. The service applies this file at every start; it can also be applied by hand, repeatedly.

-- One row per file and shard, with a status for each of the four stages. At most one stage of a row is started at a
-- time, so one lease (fence, worker, lease_until) is enough; attempts are counted for each stage.
CREATE TABLE IF NOT EXISTS pipeline_tracking (
    id bigint GENERATED ALWAYS AS IDENTITY,                 -- in the order of registration
    filename text COLLATE "C" NOT NULL CHECK (length(filename) BETWEEN 1 AND 255),
    shard integer NOT NULL CHECK (shard >= 0),
    event_ingest_status text NOT NULL DEFAULT 'new'
        CHECK (event_ingest_status IN ('new', 'started', 'done', 'failed')),
    shard_splitter_status text NOT NULL DEFAULT 'new'
        CHECK (shard_splitter_status IN ('new', 'started', 'done', 'failed')),
    shard_worker_status text NOT NULL DEFAULT 'new'
        CHECK (shard_worker_status IN ('new', 'started', 'done', 'failed')),
    mysql_sender_status text NOT NULL DEFAULT 'new'
        CHECK (mysql_sender_status IN ('new', 'started', 'done', 'failed')),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    event_ingest_attempts integer NOT NULL DEFAULT 0,
    shard_splitter_attempts integer NOT NULL DEFAULT 0,
    shard_worker_attempts integer NOT NULL DEFAULT 0,
    mysql_sender_attempts integer NOT NULL DEFAULT 0,
    due_at timestamptz NOT NULL DEFAULT clock_timestamp(),  -- order in the queues: time of registration, or of the next attempt
    fence bigint NOT NULL DEFAULT 0,
    worker text,
    lease_until timestamptz,                                -- set while a stage is started; infinity without a lease
    moves bigint[] NOT NULL DEFAULT '{}',                   -- ids of its journal entries
    CONSTRAINT uq_filename_shard UNIQUE (filename, shard)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_insert_scale_factor = 0.05);

-- The queue of each stage, in the order of claims.
CREATE INDEX IF NOT EXISTS pipeline_tracking_to_ingest ON pipeline_tracking (due_at, id)
    WHERE event_ingest_status = 'new';
CREATE INDEX IF NOT EXISTS pipeline_tracking_to_split ON pipeline_tracking (due_at, id)
    WHERE event_ingest_status = 'done' AND shard_splitter_status = 'new';
CREATE INDEX IF NOT EXISTS pipeline_tracking_to_work ON pipeline_tracking (due_at, id)
    WHERE shard_splitter_status = 'done' AND shard_worker_status = 'new';
CREATE INDEX IF NOT EXISTS pipeline_tracking_to_send ON pipeline_tracking (due_at, id)
    WHERE shard_worker_status = 'done' AND mysql_sender_status = 'new';

-- Started rows by the end of their lease, and failed rows. There are no more indexes, because every move of a row
-- writes to each index that contains it.
CREATE INDEX IF NOT EXISTS pipeline_tracking_started ON pipeline_tracking (lease_until) WHERE lease_until IS NOT NULL;
CREATE INDEX IF NOT EXISTS pipeline_tracking_failed ON pipeline_tracking (filename, shard)
    WHERE event_ingest_status = 'failed' OR shard_splitter_status = 'failed'
       OR shard_worker_status = 'failed' OR mysql_sender_status = 'failed';

-- Exact counts of rows by stage and state: each move writes its change in the same transaction. Changes are rows of their
-- own, so that transactions do not wait for a shared counter; a periodic task folds them into the counts. The state of a
-- new row that can be started is `ready`. Only the last stage is counted by shard; `shard` is -1 in the others.
CREATE TABLE IF NOT EXISTS pipeline_count (
    stage text NOT NULL,
    state text NOT NULL,
    shard integer NOT NULL,
    rows bigint NOT NULL,
    PRIMARY KEY (stage, state, shard)
) WITH (fillfactor = 50);
CREATE TABLE IF NOT EXISTS pipeline_count_change (
    stage text NOT NULL,
    state text NOT NULL,
    shard integer NOT NULL,
    rows bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000);

-- The paused stages: their rows are neither claimed nor started.
CREATE TABLE IF NOT EXISTS pipeline_pause (
    stage text PRIMARY KEY,
    since timestamptz NOT NULL,
    actor text NOT NULL,
    reason text
);

CREATE OR REPLACE FUNCTION pipeline_states(
    event_ingest text, shard_splitter text, shard_worker text, mysql_sender text, of_shard integer
) RETURNS TABLE (stage text, state text, shard integer) LANGUAGE sql IMMUTABLE AS $$
    SELECT stage, CASE WHEN status = 'new' AND before = 'done' THEN 'ready' ELSE status END, shard
    FROM (
        VALUES ('event-ingest', 'done', event_ingest, -1),
               ('shard-splitter', event_ingest, shard_splitter, -1),
               ('shard-worker', shard_splitter, shard_worker, -1),
               ('mysql-sender', shard_worker, mysql_sender, of_shard)
    ) AS stages (stage, before, status, shard)
$$;

CREATE OR REPLACE FUNCTION pipeline_count_inserted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO pipeline_count_change
    SELECT s.stage, s.state, s.shard, count(*)
    FROM new_rows t
    CROSS JOIN LATERAL pipeline_states(
        t.event_ingest_status, t.shard_splitter_status, t.shard_worker_status, t.mysql_sender_status, t.shard
    ) AS s
    GROUP BY 1, 2, 3;
    RETURN NULL;
END
$$;

-- The hot path: rows are first grouped by their statuses, so that a batch writes only a few rows.
CREATE OR REPLACE FUNCTION pipeline_count_updated() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO pipeline_count_change
    SELECT s.stage, s.state, s.shard, sum(grouped.rows)
    FROM (
        SELECT event_ingest_status, shard_splitter_status, shard_worker_status, mysql_sender_status, shard, sum(change)
        FROM (
            SELECT event_ingest_status, shard_splitter_status, shard_worker_status, mysql_sender_status, shard, -1
            FROM old_rows
            UNION ALL
            SELECT event_ingest_status, shard_splitter_status, shard_worker_status, mysql_sender_status, shard, 1
            FROM new_rows
        ) AS changes (
            event_ingest_status, shard_splitter_status, shard_worker_status, mysql_sender_status, shard, change
        )
        GROUP BY 1, 2, 3, 4, 5
        HAVING sum(change) <> 0
    ) AS grouped (event_ingest, shard_splitter, shard_worker, mysql_sender, shard, rows)
    CROSS JOIN LATERAL pipeline_states(event_ingest, shard_splitter, shard_worker, mysql_sender, grouped.shard) AS s
    GROUP BY 1, 2, 3
    HAVING sum(grouped.rows) <> 0;
    RETURN NULL;
END
$$;

CREATE OR REPLACE FUNCTION pipeline_count_deleted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO pipeline_count_change
    SELECT s.stage, s.state, s.shard, -count(*)
    FROM old_rows t
    CROSS JOIN LATERAL pipeline_states(
        t.event_ingest_status, t.shard_splitter_status, t.shard_worker_status, t.mysql_sender_status, t.shard
    ) AS s
    GROUP BY 1, 2, 3;
    RETURN NULL;
END
$$;

CREATE OR REPLACE FUNCTION pipeline_count_truncated() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    TRUNCATE pipeline_count_change, pipeline_count;  -- in the order of the fold, or they deadlock
    RETURN NULL;
END
$$;

CREATE OR REPLACE TRIGGER pipeline_count_inserted AFTER INSERT ON pipeline_tracking
    REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION pipeline_count_inserted();
CREATE OR REPLACE TRIGGER pipeline_count_updated AFTER UPDATE ON pipeline_tracking
    REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION pipeline_count_updated();
CREATE OR REPLACE TRIGGER pipeline_count_deleted AFTER DELETE ON pipeline_tracking
    REFERENCING OLD TABLE AS old_rows FOR EACH STATEMENT EXECUTE FUNCTION pipeline_count_deleted();
CREATE OR REPLACE TRIGGER pipeline_count_truncated AFTER TRUNCATE ON pipeline_tracking
    FOR EACH STATEMENT EXECUTE FUNCTION pipeline_count_truncated();
