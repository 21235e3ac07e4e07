"""Serve dictionaries from the memory over HTTP."""
