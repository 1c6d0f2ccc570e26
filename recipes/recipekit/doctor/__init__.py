"""Checks this machine, or all hosts of a run, before a run starts."""
