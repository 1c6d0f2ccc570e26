"""Starts jobs: `python -m launch` finds out where it runs and who forks the ranks, prints one command, and runs it. Standard library only."""
