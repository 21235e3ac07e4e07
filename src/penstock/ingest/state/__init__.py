"""What is published: read, compare, verify, retain."""
