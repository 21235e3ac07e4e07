"""The configuration file: loading, and sections that parts share."""
