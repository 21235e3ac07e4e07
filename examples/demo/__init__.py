"""One morning of a data platform, told by `make demo`: files, a feed, events, dictionaries, a flow over all of it."""
