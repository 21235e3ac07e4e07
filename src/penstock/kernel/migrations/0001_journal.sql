-- Every move of every machine. With `tx` a reader distinguishes settled entries from those that others may still precede.
CREATE TABLE journal (
    tx xid8 NOT NULL DEFAULT pg_current_xact_id(),
    id bigint GENERATED ALWAYS AS IDENTITY,
    machine text NOT NULL,
    subject text NOT NULL,
    source text,
    target text NOT NULL,
    actor text NOT NULL,
    at timestamptz NOT NULL,
    reason text,
    fence bigint,
    PRIMARY KEY (tx, id)
);
CREATE INDEX journal_subject ON journal (machine, subject, id);
CREATE INDEX journal_at ON journal USING brin (at);
