"""The demo of all five parts that `penstock demo` runs, and the sample files that come with it."""
