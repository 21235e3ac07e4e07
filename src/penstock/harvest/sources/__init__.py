"""The sources of records: HTTP APIs, called at the rate that each allows."""
