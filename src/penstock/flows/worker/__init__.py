"""The execution of steps: the work loop, and the local and remote connection to the engine."""
