-- What others see of ingest. The tree of files is the truth; these tables tell of it, and can be filled again from it.

CREATE TABLE ingest_run (
    run_id text COLLATE "C" PRIMARY KEY,
    supplier text COLLATE "C" NOT NULL,
    status text NOT NULL CHECK (status IN ('RUNNING', 'PASS', 'FAIL')),
    holder text NOT NULL,                      -- the process that works, or worked, on it
    failure_code text,
    started_at timestamptz NOT NULL,
    finished_at timestamptz,
    manifest jsonb,                            -- as it is in the tree, once the run has ended
    moves bigint[] NOT NULL DEFAULT '{}'       -- the numbers of its entries in the journal
);
CREATE INDEX ingest_run_latest ON ingest_run (started_at DESC, run_id DESC);
CREATE INDEX ingest_run_of_supplier ON ingest_run (supplier, started_at DESC, run_id DESC);

-- Where files went, and why.
CREATE TABLE ingest_move (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    supplier text COLLATE "C" NOT NULL,
    run_id text COLLATE "C",                   -- null: while the inbox was sorted, before a run
    file_name text NOT NULL,
    moved_to text NOT NULL,
    why text NOT NULL,
    moved_at timestamptz NOT NULL
);
CREATE INDEX ingest_move_of_supplier ON ingest_move (supplier, id DESC);
CREATE INDEX ingest_move_of_run ON ingest_move (run_id) WHERE run_id IS NOT NULL;
