"""The journal of state changes, and the stream of them."""
