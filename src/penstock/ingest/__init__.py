"""Ingest: supplier files in, published versions out.

In the order of the data: tree (where files are), extract (file to tables), transform (tables to facts), run (select,
quality, publish, recover), state (published versions), deliver (targets). inspect proposes a configuration, api
serves operators, watcher starts runs.
"""
