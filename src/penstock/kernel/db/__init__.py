"""PostgreSQL: connections, SQL files, migrations, locks, notifications, the embedded server."""
