"""Estimates of the resources that a run needs, before it starts."""
