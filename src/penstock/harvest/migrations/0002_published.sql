-- What the last completed run left of a feed that dictionaries read. `canonical_record` changes set by set while a run is
-- consolidated; this changes in the transaction that completes the run, so that no reader sees half of one.
CREATE TABLE published_record (
    feed text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    fields jsonb NOT NULL,
    cost numeric,
    price numeric,
    rule text,
    run_id uuid NOT NULL,                      -- with the next two: which state of the canonical record it is
    version bigint NOT NULL,
    changed_at timestamptz NOT NULL,
    PRIMARY KEY (feed, key)
) WITH (fillfactor = 90);
