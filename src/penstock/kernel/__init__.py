"""Kernel: what all parts use, without business terms.

From the bottom: errors, clock, text, findings; config, machine, ids, canonical, storage, tasks; db, telemetry; http,
signals, states, work; bus.
"""
