"""HTTP for daemons and operators."""
