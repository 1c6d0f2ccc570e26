"""Optimizers, parameter groups, and our workarounds for the optimizer step in DeepSpeed."""
