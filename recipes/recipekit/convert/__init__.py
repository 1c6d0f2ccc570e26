"""Conversion of checkpoints from and to Hugging Face files."""
