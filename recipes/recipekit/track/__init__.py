"""Metrics, progress line, summary and loss plot of a run."""
