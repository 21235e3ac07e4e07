"""Measurements, never assertions: `python -m benchmarks` prints a table, or JSON on request."""
