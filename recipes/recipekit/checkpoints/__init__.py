"""Writes what a run leaves on the disk, and brings it into every other layout."""
