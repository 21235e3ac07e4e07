"""The delivery of published states to targets: dictionaries, flows and webhooks."""
