"""The `refdata` section of penstock.yaml."""

from penstock.kernel.config import Section


class RefdataSection(Section):
    """Refdata: dictionaries in by REST and Kafka, out from memory."""
