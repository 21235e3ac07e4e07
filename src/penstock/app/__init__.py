"""Composition root: the only package that opens and connects the parts.

In the order of a start: programs, process, factories (ports), schema, platform, parts, bridges (adapters between
parts), apis, http_server. reload and doctor work on a running configuration.
"""
