"""Work loops, and leases over rows."""
