"""Plan a run: windows and partitions."""
