"""Chooses which arithmetic runs on the device."""
