"""Outcomes, back-off, periodic tasks, waiting."""
