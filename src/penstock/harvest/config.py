"""The `harvest` section of penstock.yaml."""

from penstock.kernel.config import Section


class HarvestSection(Section):
    """Harvest: paged APIs synced by partition, consolidated, watermarked."""
