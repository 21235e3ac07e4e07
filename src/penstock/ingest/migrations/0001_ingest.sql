-- Runs and moved files of ingest, for the API. The tree of files is the source; these tables can be filled again from it.

CREATE TABLE ingest_run (
    run_id text COLLATE "C" PRIMARY KEY,
    supplier text COLLATE "C" NOT NULL,
    status text NOT NULL CHECK (status IN ('RUNNING', 'PASS', 'FAIL')),
    holder text NOT NULL,                      -- the process of the run
    failure_code text,
    started_at timestamptz NOT NULL,
    finished_at timestamptz,
    manifest jsonb,                            -- the same as in the tree; null until the run ends
    moves bigint[] NOT NULL DEFAULT '{}'       -- the numbers of the journal entries of the run
);
CREATE INDEX ingest_run_latest ON ingest_run (started_at DESC, run_id DESC);
CREATE INDEX ingest_run_of_supplier ON ingest_run (supplier, started_at DESC, run_id DESC);

-- Files that were moved out of an inbox, with the reason.
CREATE TABLE ingest_move (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    supplier text COLLATE "C" NOT NULL,
    run_id text COLLATE "C",                   -- null: a duplicate or an obsolete file, moved before a run starts
    file_name text NOT NULL,
    moved_to text NOT NULL,
    reason text NOT NULL,
    moved_at timestamptz NOT NULL
);
CREATE INDEX ingest_move_of_supplier ON ingest_move (supplier, id DESC);
CREATE INDEX ingest_move_of_run ON ingest_move (run_id) WHERE run_id IS NOT NULL;
