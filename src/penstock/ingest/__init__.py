"""Ingest: supplier snapshot files in, published state out."""
