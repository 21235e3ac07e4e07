"""Load dictionaries into the memory and keep them up to date."""
