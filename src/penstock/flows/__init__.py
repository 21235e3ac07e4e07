"""Flows: DAGs of steps run by workers."""
