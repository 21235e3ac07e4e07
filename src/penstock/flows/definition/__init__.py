"""Definitions of flows: models, expressions, validation, loading, schedules and drawings."""
