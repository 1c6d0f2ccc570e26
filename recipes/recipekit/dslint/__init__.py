"""Reads, checks and fills in the DeepSpeed JSON, by facts and rules about its keys."""
