"""Examines the machines: their builds, compiled ops, links and limits."""
