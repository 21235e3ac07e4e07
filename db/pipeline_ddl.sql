-- The pipeline's tables: applied when the service starts, and safe to apply by hand before, any number of times.

-- One row per file and shard, with a status for each of the four stages. At most one stage of a row is under way at a
-- time, so one lease (fence, worker, lease_until) serves them all; attempts are counted stage by stage.
CREATE TABLE IF NOT EXISTS pipeline_tracking (
    id bigint GENERATED ALWAYS AS IDENTITY,                 -- in order of arrival
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
    due_at timestamptz NOT NULL DEFAULT clock_timestamp(),  -- its place in the queues: when it came, or may be tried again
    fence bigint NOT NULL DEFAULT 0,
    worker text,
    lease_until timestamptz,                                -- set while a stage is started; infinity without a lease
    moves bigint[] NOT NULL DEFAULT '{}',                   -- the numbers of its entries in the journal
    CONSTRAINT uq_filename_shard UNIQUE (filename, shard)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_insert_scale_factor = 0.05);

-- What waits for each stage, in the order it is handed out.
CREATE INDEX IF NOT EXISTS pipeline_tracking_to_ingest ON pipeline_tracking (due_at, id)
    WHERE event_ingest_status = 'new';
CREATE INDEX IF NOT EXISTS pipeline_tracking_to_split ON pipeline_tracking (due_at, id)
    WHERE event_ingest_status = 'done' AND shard_splitter_status = 'new';
CREATE INDEX IF NOT EXISTS pipeline_tracking_to_work ON pipeline_tracking (due_at, id)
    WHERE shard_splitter_status = 'done' AND shard_worker_status = 'new';
CREATE INDEX IF NOT EXISTS pipeline_tracking_to_send ON pipeline_tracking (due_at, id)
    WHERE shard_worker_status = 'done' AND mysql_sender_status = 'new';

-- What is under way, whose lease runs out first; and what failed. Nothing else is indexed: every move of a row writes
-- to every index it is in.
CREATE INDEX IF NOT EXISTS pipeline_tracking_started ON pipeline_tracking (lease_until) WHERE lease_until IS NOT NULL;
CREATE INDEX IF NOT EXISTS pipeline_tracking_failed ON pipeline_tracking (filename, shard)
    WHERE event_ingest_status = 'failed' OR shard_splitter_status = 'failed'
       OR shard_worker_status = 'failed' OR mysql_sender_status = 'failed';

-- How many rows stand where: exact, because whatever moves a row writes what changed in the same transaction. Changes
-- are rows of their own, so that movers never queue for a counter; now and then they are folded into the counts.
-- A row that is new and may be started counts as `ready`. Only the last stage is counted by shard, as nobody asks for
-- more; `shard` is -1 in the others.
CREATE TABLE IF NOT EXISTS pipeline_count (
    stage text NOT NULL,
    standing text NOT NULL,
    shard integer NOT NULL,
    rows bigint NOT NULL,
    PRIMARY KEY (stage, standing, shard)
) WITH (fillfactor = 50);
CREATE TABLE IF NOT EXISTS pipeline_count_change (
    stage text NOT NULL,
    standing text NOT NULL,
    shard integer NOT NULL,
    rows bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000);

-- A stage listed here is paused: nothing of it is handed out or started.
CREATE TABLE IF NOT EXISTS pipeline_pause (
    stage text PRIMARY KEY,
    since timestamptz NOT NULL,
    actor text NOT NULL,
    reason text
);

CREATE OR REPLACE FUNCTION pipeline_standing(
    event_ingest text, shard_splitter text, shard_worker text, mysql_sender text, of_shard integer
) RETURNS TABLE (stage text, standing text, shard integer) LANGUAGE sql IMMUTABLE AS $$
    SELECT stage, CASE WHEN status = 'new' AND before = 'done' THEN 'ready' ELSE status END, shard
    FROM (
        VALUES ('event-ingest', 'done', event_ingest, -1),
               ('shard-splitter', event_ingest, shard_splitter, -1),
               ('shard-worker', shard_splitter, shard_worker, -1),
               ('mysql-sender', shard_worker, mysql_sender, of_shard)
    ) AS stages (stage, before, status, shard)
$$;

CREATE OR REPLACE FUNCTION pipeline_count_arrived() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO pipeline_count_change
    SELECT s.stage, s.standing, s.shard, count(*)
    FROM arrived t
    CROSS JOIN LATERAL pipeline_standing(
        t.event_ingest_status, t.shard_splitter_status, t.shard_worker_status, t.mysql_sender_status, t.shard
    ) AS s
    GROUP BY 1, 2, 3;
    RETURN NULL;
END
$$;

-- The hot one: rows are first put together by where they stand, so that a batch is but a few lines to count.
CREATE OR REPLACE FUNCTION pipeline_count_moved() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO pipeline_count_change
    SELECT s.stage, s.standing, s.shard, sum(alike.rows)
    FROM (
        SELECT event_ingest_status, shard_splitter_status, shard_worker_status, mysql_sender_status, shard, sum(change)
        FROM (
            SELECT event_ingest_status, shard_splitter_status, shard_worker_status, mysql_sender_status, shard, -1
            FROM gone
            UNION ALL
            SELECT event_ingest_status, shard_splitter_status, shard_worker_status, mysql_sender_status, shard, 1
            FROM arrived
        ) AS changes (
            event_ingest_status, shard_splitter_status, shard_worker_status, mysql_sender_status, shard, change
        )
        GROUP BY 1, 2, 3, 4, 5
        HAVING sum(change) <> 0
    ) AS alike (event_ingest, shard_splitter, shard_worker, mysql_sender, shard, rows)
    CROSS JOIN LATERAL pipeline_standing(event_ingest, shard_splitter, shard_worker, mysql_sender, alike.shard) AS s
    GROUP BY 1, 2, 3
    HAVING sum(alike.rows) <> 0;
    RETURN NULL;
END
$$;

CREATE OR REPLACE FUNCTION pipeline_count_gone() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO pipeline_count_change
    SELECT s.stage, s.standing, s.shard, -count(*)
    FROM gone t
    CROSS JOIN LATERAL pipeline_standing(
        t.event_ingest_status, t.shard_splitter_status, t.shard_worker_status, t.mysql_sender_status, t.shard
    ) AS s
    GROUP BY 1, 2, 3;
    RETURN NULL;
END
$$;

CREATE OR REPLACE FUNCTION pipeline_count_nothing() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    TRUNCATE pipeline_count_change, pipeline_count;  -- in the order of the fold, or they deadlock
    RETURN NULL;
END
$$;

CREATE OR REPLACE TRIGGER pipeline_count_arrived AFTER INSERT ON pipeline_tracking
    REFERENCING NEW TABLE AS arrived FOR EACH STATEMENT EXECUTE FUNCTION pipeline_count_arrived();
CREATE OR REPLACE TRIGGER pipeline_count_moved AFTER UPDATE ON pipeline_tracking
    REFERENCING OLD TABLE AS gone NEW TABLE AS arrived FOR EACH STATEMENT EXECUTE FUNCTION pipeline_count_moved();
CREATE OR REPLACE TRIGGER pipeline_count_gone AFTER DELETE ON pipeline_tracking
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION pipeline_count_gone();
CREATE OR REPLACE TRIGGER pipeline_count_nothing AFTER TRUNCATE ON pipeline_tracking
    FOR EACH STATEMENT EXECUTE FUNCTION pipeline_count_nothing();
