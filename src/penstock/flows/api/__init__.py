"""HTTP: runs for operators, steps for workers."""
