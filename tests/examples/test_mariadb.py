"""The MariaDB that pipelines write into is a real one here."""

from tests.services.mariadb import mariadb_binary, query, running_mariadb
from tests.support.require import require


def test_a_real_mariadb_keeps_what_is_written() -> None:
    """T18: the shards of the example pipeline have a real server to be written to, transactions and all."""
    if mariadb_binary() is None:
        require("mariadb", "no mariadbd on this machine")
    with running_mariadb() as socket:
        query(socket, "CREATE DATABASE shard_0; CREATE TABLE shard_0.event (id INT PRIMARY KEY) ENGINE=InnoDB")
        query(socket, "START TRANSACTION; INSERT INTO shard_0.event VALUES (1), (2); COMMIT")
        query(socket, "START TRANSACTION; INSERT INTO shard_0.event VALUES (3); ROLLBACK")
        assert query(socket, "SELECT count(*) FROM shard_0.event") == "2"
