"""How flows are written: documents, expressions, the step graph, schedules."""
