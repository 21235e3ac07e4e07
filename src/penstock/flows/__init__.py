"""Flows: graphs of steps, executed by workers.

In the order of the data: definition (documents, validation), engine (plan, advance, decide, publish), worker (claim,
report), kinds (built-in steps), api. runtime and maintenance run in the background.
"""
