"""HTTP for operators."""
