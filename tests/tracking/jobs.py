"""A small leased table for tests, as a part would declare it."""

from enum import StrEnum

from penstock.kernel.db.database import Database
from penstock.kernel.machine import StateMachine, Transition
from penstock.tracking.lease import Lease


class Job(StrEnum):
    """The states of a job."""

    NEW = "new"
    STARTED = "started"
    DONE = "done"
    FAILED = "failed"


JOB = StateMachine(
    "job",
    Job,
    initial=Job.NEW,
    moves=[
        Transition("start", (Job.NEW,), Job.STARTED),
        Transition("done", (Job.STARTED,), Job.DONE),
        Transition("fail", (Job.NEW, Job.STARTED), Job.FAILED),
        Transition("retry", (Job.FAILED,), Job.NEW),
    ],
    groups={"open": (Job.NEW, Job.STARTED)},
)
MAX_ATTEMPTS = 3
LEASE = Lease(
    "job", JOB, ready=Job.NEW, claimed=Job.STARTED, done=Job.DONE, failed=Job.FAILED, max_attempts=MAX_ATTEMPTS
)
TABLE = f"""
CREATE TABLE job (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    status text NOT NULL DEFAULT 'new' CHECK ({JOB.format_sql_check("status")}),
    fence bigint NOT NULL DEFAULT 0,
    attempts integer NOT NULL DEFAULT 0,
    due_at timestamptz NOT NULL DEFAULT '-infinity',
    worker text,
    lease_until timestamptz,
    moves bigint[] NOT NULL DEFAULT '{{}}'
) WITH (fillfactor = 70);
CREATE INDEX job_ready ON job (due_at, id) WHERE status = {JOB.format_sql("NEW")};
CREATE INDEX job_claimed ON job (lease_until) WHERE status = {JOB.format_sql("STARTED")};
"""


async def make_jobs(db: Database, count: int) -> None:
    """Create the table with *count* new rows, numbered from 1."""
    await db.execute(TABLE)
    await db.execute("INSERT INTO job (due_at) SELECT '-infinity' FROM generate_series(1, $1::int)", count)
