"""Kernel: what all parts use, without business terms.

From the bottom: clock, errors, status, text, validation; canonical, config, ids, machine, storage, tasks;
db, telemetry; http, signals, states, work; bus.
"""
