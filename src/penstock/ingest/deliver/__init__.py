"""Tell targets of a publication."""
