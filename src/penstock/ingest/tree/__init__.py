"""Where files live: a folder or a bucket."""
