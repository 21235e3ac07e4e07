-- The live records of a feed that dictionaries read. `canonical_record` changes set by set during consolidation; this table
-- changes in the transaction that completes the run, so that readers never see a part of a run.
CREATE TABLE published_record (
    feed text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    fields jsonb NOT NULL,
    cost numeric,
    price numeric,
    rule text,
    run_id uuid NOT NULL,                      -- with version and changed_at: identifies the canonical state
    version bigint NOT NULL,
    changed_at timestamptz NOT NULL,
    PRIMARY KEY (feed, key)
) WITH (fillfactor = 90);
