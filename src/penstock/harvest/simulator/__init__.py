"""H17: a paged API in one process, with the records, the changes and the faults that a test asks for."""
