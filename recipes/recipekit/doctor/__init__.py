"""Checks that run before a run starts, on this machine or on all of the run's hosts."""
