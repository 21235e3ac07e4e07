"""Refdata: dictionaries, changed over HTTP and Kafka and served from memory.

In the order of the data flow: api, commands (input), apply (one transaction per batch, relay), dictionaries (SQL,
retained versions), pod (load, memory, serve). runtime and maintenance run the roles and the periodic tasks.
"""
