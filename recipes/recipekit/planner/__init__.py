"""Counts what a run will need, before it runs."""
