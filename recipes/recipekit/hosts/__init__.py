"""Checks of the machines: torch builds, compiled ops, GPUs, ports and limits."""
