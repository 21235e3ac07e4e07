"""The `ingest` section of penstock.yaml."""

from penstock.kernel.config import Section


class IngestSection(Section):
    """Ingest: supplier snapshot files in, published state out."""
