-- The bus on PostgreSQL. A partition is leased as a whole, so messages have no state: settled messages are deleted.
CREATE TABLE bus_partition (
    topic text NOT NULL,
    partition integer NOT NULL,
    fence bigint NOT NULL DEFAULT 0,
    holder text,
    lease_until timestamptz,                            -- set while claimed; still set after the worker died
    taken_at timestamptz NOT NULL DEFAULT '-infinity',
    taken_upto bigint,                                  -- the last message of the delivered batch
    suspect_upto bigint,                                -- messages up to here were delivered when a worker died
    head bigint,                                        -- the message that `attempts` belongs to
    attempts integer NOT NULL DEFAULT 0,
    due_at timestamptz NOT NULL DEFAULT '-infinity',
    PRIMARY KEY (topic, partition)
) WITH (fillfactor = 50);

CREATE TABLE bus_message (
    topic text NOT NULL,
    partition integer NOT NULL,
    id bigint GENERATED ALWAYS AS IDENTITY,
    key text NOT NULL,
    value bytea NOT NULL,
    headers jsonb NOT NULL,
    published_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (topic, partition, id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);

CREATE TABLE bus_dead_letter (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic text NOT NULL,
    key text NOT NULL,
    value bytea NOT NULL,
    headers jsonb NOT NULL,
    reason text NOT NULL,
    attempts integer NOT NULL,
    died_at timestamptz NOT NULL
);
CREATE INDEX bus_dead_letter_topic ON bus_dead_letter (topic, id);

-- Messages for an external broker, written in the transaction that causes them.
CREATE TABLE bus_outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic text NOT NULL,
    key text NOT NULL,
    value bytea NOT NULL,
    headers jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    published boolean NOT NULL DEFAULT false
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);
CREATE INDEX bus_outbox_waiting ON bus_outbox (id) WHERE NOT published;
