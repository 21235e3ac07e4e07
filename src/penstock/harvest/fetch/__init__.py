"""Fetch partitions: store the pages of the source as raw records."""
