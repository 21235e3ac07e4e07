"""The input of refdata: commands from HTTP, the bus and external topics."""
