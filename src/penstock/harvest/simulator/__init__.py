"""H17: a simulator of a paged API in one process, with the records, changes and faults that a test requests."""
