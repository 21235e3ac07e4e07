"""The overview of all parts: one event stream, and one report of what is late or broken."""
