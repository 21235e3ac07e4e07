"""One configured feed: its source, its records, its recipe."""
