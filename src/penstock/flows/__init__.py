"""Flows: graphs of steps, executed by workers.

The folders follow the data: definition (documents, validation), engine (plan, advance, decide, publish), worker (claim,
report), kinds (built-in steps), and api. runtime and maintenance run in the background.
"""
