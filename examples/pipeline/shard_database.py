"""A shard's MySQL or MariaDB database: events, and a ledger of the files they came from."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pymysql
from pymysql.constants import ER

TIMEOUT = 60  # seconds without an answer after which a server counts as away
# Names are compared byte by byte: in a text column, `a`, `A` and `a ` could be one file, and two of them lost.
TABLES = (
    """
    CREATE TABLE IF NOT EXISTS `event` (
        event_id     VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY,
        user_id      VARCHAR(64) NOT NULL,
        kind         VARCHAR(64) NOT NULL,
        amount_cents BIGINT NOT NULL,
        `at`         DATETIME(6) NOT NULL
    ) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4
    """,
    """
    CREATE TABLE IF NOT EXISTS sent_file (
        filename VARBINARY(1020) NOT NULL,
        shard    INT NOT NULL,
        `rows`   INT NOT NULL,
        sent_at  DATETIME(6) NOT NULL,
        PRIMARY KEY (filename, shard)
    ) ENGINE = InnoDB
    """,
)
LEDGER = "INSERT INTO sent_file (filename, shard, `rows`, sent_at) VALUES (%s, %s, %s, utc_timestamp(6))"
EVENT = """
    INSERT INTO `event` (event_id, user_id, kind, amount_cents, `at`)
    VALUES (%(event_id)s, %(user_id)s, %(kind)s, %(amount_cents)s, %(at)s)
"""


@dataclass
class ShardDatabase:
    """Where the rows of one shard go."""

    server: dict[str, Any]
    user: str
    password: str = field(repr=False)
    _has_tables: bool = field(default=False, init=False)

    @classmethod
    def at(cls, address: str, user: str, password: str) -> "ShardDatabase":
        """Return the database at *address*: `host/database`, `host:port/database` or `/path/of/socket/database`."""
        server, _, database = address.rpartition("/")
        if not server or not database:
            raise ValueError(f"{address!r} is not an address such as 127.0.0.1:3306/shard_0")
        return cls({**_server(server), "database": database}, user, password)

    def write(self, filename: str, shard: int, rows: Sequence[dict[str, Any]]) -> bool:
        """Keep *rows* and the file's line in the ledger, both or neither; False when they are there already."""
        with closing(self._connect()) as connection, connection.cursor() as cursor:
            # The ledger first: another sender of this file waits here, and then finds that it was sent.
            try:
                cursor.execute(LEDGER, (filename.encode(), shard, len(rows)))
            except pymysql.err.IntegrityError as error:
                if error.args[0] != ER.DUP_ENTRY:
                    raise
                return False
            cursor.executemany(EVENT, rows)
            connection.commit()
        return True  # what was not committed was rolled back when the connection closed

    def _connect(self) -> "pymysql.Connection[pymysql.cursors.Cursor]":
        connection = pymysql.connect(
            **self.server,
            user=self.user,
            password=self.password,
            charset="utf8mb4",
            sql_mode="TRADITIONAL",  # a value that does not fit is an error, never cut short
            connect_timeout=TIMEOUT,
            read_timeout=TIMEOUT,
            write_timeout=TIMEOUT,
        )
        if not self._has_tables:
            with connection.cursor() as cursor:
                for table in TABLES:
                    cursor.execute(table)
            self._has_tables = True
        return connection


def _server(address: str) -> dict[str, Any]:
    if address.startswith("/"):
        return {"unix_socket": address}
    host, _, port = address.partition(":")
    if port and not port.isdecimal():
        raise ValueError(f"{port!r} in {address!r} is no port")
    return {"host": host, "port": int(port or 3306)}
