"""The `flows` section of penstock.yaml."""

from penstock.kernel.config import Section


class FlowsSection(Section):
    """Flows: DAGs of steps run by workers."""
