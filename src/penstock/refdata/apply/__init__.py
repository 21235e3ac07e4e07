"""Apply commands to PostgreSQL, one transaction per batch."""
