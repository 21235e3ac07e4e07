"""Step kinds that call the other parts."""
