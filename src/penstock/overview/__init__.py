"""All parts together: one stream of what happens, one answer to what is late or broken."""
