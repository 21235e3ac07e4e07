"""What executes steps: the claim loop, and the local and remote connection to the engine."""
