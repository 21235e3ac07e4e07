"""Consolidate raw records, publish them and complete the run."""
