"""Starts jobs: `python -m launch` finds out where it runs and who forks the ranks, prints one
command, and runs it.

Standard library only.
"""

import sys

if sys.argv[0] == "-m" and not sys.flags.safe_path:
    # `python -m` searches the current folder first, and a file random.py there would hide the
    # library
    del sys.path[0]
