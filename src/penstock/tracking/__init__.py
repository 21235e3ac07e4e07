"""Tracking: the state of each file and shard, stage by stage, for daemons in any language.

In the order of the data: api (HTTP), service and store (use cases and SQL), lease (claim, heartbeat, settle), sdk (a
daemon in Python). runtime and maintenance run in the background.
"""
