"""The `tracking` section of penstock.yaml."""

from penstock.kernel.config import Section


class TrackingSection(Section):
    """Tracking: where each file and shard stands, stage by stage."""
