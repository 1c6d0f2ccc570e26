"""Metrics, progress line, summary and loss picture of a run."""
