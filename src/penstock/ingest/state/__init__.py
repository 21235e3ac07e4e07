"""The published states: read, compare, verify, delete expired ones."""
