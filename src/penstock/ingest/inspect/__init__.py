"""Propose a supplier configuration from an example file."""
