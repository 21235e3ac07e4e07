"""The kinds of steps that come with Penstock."""
