"""The read side: dictionaries in the memory of a pod, loaded by one process and served by others."""
