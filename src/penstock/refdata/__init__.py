"""Refdata: dictionaries in by REST and Kafka, out from memory."""
