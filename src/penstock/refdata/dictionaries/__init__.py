"""Dictionaries: their configuration, their items in SQL, their retained versions."""
