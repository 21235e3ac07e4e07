"""What all five parts share; no business word in here."""
