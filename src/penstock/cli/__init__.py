"""The command line: one file per group, and nothing heavy imported before a command needs it."""
