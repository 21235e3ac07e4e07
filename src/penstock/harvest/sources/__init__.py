"""Sources of records: HTTP APIs, called at a limited rate."""
