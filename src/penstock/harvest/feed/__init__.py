"""A configured feed: its source, its records, its mapping."""
