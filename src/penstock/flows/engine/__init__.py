"""The engine that moves runs: plan, advance, decide, publish, and the operations of users."""
