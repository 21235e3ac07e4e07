"""What moves runs: plan, advance, decide, publish, operator actions."""
