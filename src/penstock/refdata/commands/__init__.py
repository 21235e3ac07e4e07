"""The way in: commands from HTTP, the bus and external topics."""
