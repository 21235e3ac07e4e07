"""All parts together."""
