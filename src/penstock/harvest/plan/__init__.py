"""Plan a run: its window and its partitions."""
