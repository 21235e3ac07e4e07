"""The HTTP API of ingest, its documents, and its Python client."""
