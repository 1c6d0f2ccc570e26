"""Watching of a run: what goes wrong is detected in its step, named and reported as an alert.

The modules of this package import no torch. The monitor judges numbers that the step has computed
anyway, so it adds no collective. The finder of hangs reads stacks and files in a thread.
"""
