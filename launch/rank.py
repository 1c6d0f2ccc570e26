"""Becomes one rank: the launcher starts this program, which sends its output to a file and turns
into the script.

    python rank.py SCRIPT ARGUMENTS...

The process id and the parent stay, so that launcher and rank see each other as if nothing stood
between them.
"""

import json
import os
import signal
import sys

# Ask for a checkpoint and an end; schedulers announce with the last three that the time is over
STOPS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)


def main() -> None:
    rank, local_rank = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0")
    log = os.open(
        os.path.join(os.environ["LAUNCH_LOGS"], f"rank_{rank}.log"),
        os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        0o666,
    )
    nothing = os.open(os.devnull, os.O_RDONLY)
    # torchrun sets it, deepspeed does not
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["LAUNCH_LOCAL_WORLD_SIZE"]
    # so that a crash in C++ leaves Python's stacks in the file
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    # by cores.py; the rank, and what it starts, keeps to them
    if dealt := os.environ.get("LAUNCH_CORES"):
        os.sched_setaffinity(
            0, [int(core) for core in dealt.split(";")[int(local_rank)].split(",")]
        )
    with open(os.environ["LAUNCH_PIPE"], "w") as pipe:
        pipe.write(json.dumps({"rank": int(rank), "pid": os.getpid()}) + "\n")
    for own, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(own, target)
    # the launchers block these signals: a signal to all processes of a host must not make a
    # launcher kill a rank that is saving
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv[1:]])


if __name__ == "__main__":
    main()
