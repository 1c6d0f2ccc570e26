"""Parallel layouts: the sharding of every tensor, the groups of ranks and the four parallelisms."""
