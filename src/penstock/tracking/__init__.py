"""Tracking: where each file and shard stands, stage by stage."""
