"""Checkpoints of a run: saving, loading, and conversion to different layouts."""
