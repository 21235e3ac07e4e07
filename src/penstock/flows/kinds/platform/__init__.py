"""Step kinds that call other parts of Penstock."""
