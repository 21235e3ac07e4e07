"""The HTTP API of commands, updates and versions."""
