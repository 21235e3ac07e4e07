"""HTTP: commands, updates, versions."""
