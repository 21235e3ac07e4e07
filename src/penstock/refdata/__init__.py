"""Refdata: dictionaries in over HTTP and Kafka, out from memory.

In the order of the data: api, commands (input), apply (one transaction per batch, relay), dictionaries (SQL, retained
versions), pod (load, memory, serve). runtime and maintenance run in the background.
"""
