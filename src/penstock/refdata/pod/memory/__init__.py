"""The memory that the processes of a pod share."""
