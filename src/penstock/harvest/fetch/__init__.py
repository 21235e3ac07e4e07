"""Fetch partitions: pages of the source into raw records."""
