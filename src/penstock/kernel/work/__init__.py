"""The work loop: take work, execute it, settle it, drain."""
