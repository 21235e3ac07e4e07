"""Tables to facts: header check, values, keys, NDJSON."""
