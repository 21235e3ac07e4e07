"""Logs, metrics, traces, the build."""
