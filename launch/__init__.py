"""Job launcher, which uses only the standard library.

`python -m launch` finds out where it runs and which program forks the ranks, prints one command,
and runs it.
"""

import sys

if sys.argv[0] == "-m" and not sys.flags.safe_path:
    # `python -m` searches the current folder first, where a file random.py would shadow the
    # library's module.
    del sys.path[0]
