"""mysql-sender: writes the rows of each shard into the shard's database, exactly once."""

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import structlog
from pymysql.err import DataError, IntegrityError, MySQLError

from penstock.kernel.telemetry.telemetry import configure_logging
from penstock.tracking.sdk import Item, SyncStageDaemon

from . import options
from .events import read_rows
from .files import rows_file
from .shard_database import ShardDatabase

STAGE = "mysql-sender"
WAIT = 5  # seconds until a server that is away is tried again
log = structlog.get_logger(stage=STAGE)


def run(given: Namespace, databases: Sequence[ShardDatabase]) -> None:
    # PyMySQL blocks; the daemon's own thread keeps the lease meanwhile.
    daemon = SyncStageDaemon(
        STAGE, given.url, worker=given.worker, batch=given.batch, lease=given.lease, token=options.token()
    )
    with daemon:
        for item in daemon:
            handle(item, databases, given.folder)


def handle(item: Item, databases: Sequence[ShardDatabase], folder: Path) -> None:
    """Send one shard of a file; it is done unless a failure is reported."""
    event_log = log.bind(filename=item.filename, shard=item.shard, attempt=item.attempt)
    event_log.info("sending")
    if item.shard >= len(databases):
        item.fail(f"shard {item.shard} has no database: --mysql names {len(databases)}")
        return
    try:
        rows = read_rows(rows_file(folder, item.filename, item.shard))
        is_new = databases[item.shard].write(item.filename, item.shard, rows)
    except (DataError, IntegrityError) as error:  # will be so the next time, too
        item.fail(f"MySQL refused it: {error}")
    except (MySQLError, OSError) as error:
        event_log.warning("not_sent", error=str(error))
        # Not the file's fault, so it costs no attempt: it is tried again for as long as the server is away.
        item.release(f"{type(error).__name__}: {error}", after=WAIT)
    else:
        event_log.info("sent" if is_new else "was_sent_before", rows=len(rows))


def main() -> None:
    parser = options.queue_parser(__doc__)
    parser.add_argument(
        "--mysql",
        nargs="+",
        required=True,
        metavar="ADDRESS",
        help="the databases of shards 0, 1, …: host/database, host:port/database or /path/of/socket/database",
    )
    parser.add_argument("--user", default="root", help="the MySQL user (%(default)s); its password by MYSQL_PASSWORD")
    given = parser.parse_args()
    password = os.environ.get("MYSQL_PASSWORD", "")
    try:
        databases = [ShardDatabase.at(address, given.user, password) for address in given.mysql]
    except ValueError as error:
        parser.error(str(error))
    configure_logging()
    run(given, databases)


if __name__ == "__main__":
    main()
