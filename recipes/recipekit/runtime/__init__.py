"""Surrounds the loop: prepares a run, lets ranks agree, tracks, stops and fails."""
