"""The program that the launcher starts as one rank.

    python rank.py SCRIPT ARGUMENTS...

It redirects its output to a file and then becomes the script. The process id and the parent stay
the same, so launcher and rank see each other as if this program did not exist.
"""

import json
import os
import signal
import sys

# These signals request a checkpoint and an end. Schedulers send the last three signals when the
# time limit is near.
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
    # torchrun sets this variable, but deepspeed does not.
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["LAUNCH_LOCAL_WORLD_SIZE"]
    # After a crash in C++, Python's stacks are then written to the file.
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    # cores.py has assigned these cores. The rank and its child processes use only these cores.
    if dealt := os.environ.get("LAUNCH_CORES"):
        os.sched_setaffinity(
            0, [int(core) for core in dealt.split(";")[int(local_rank)].split(",")]
        )
    with open(os.environ["LAUNCH_PIPE"], "w") as pipe:
        pipe.write(json.dumps({"rank": int(rank), "pid": os.getpid()}) + "\n")
    for own, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(own, target)
    # The launchers block these signals, because a signal to all processes on a host must not make a
    # launcher kill a rank that is saving.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv[1:]])


if __name__ == "__main__":
    main()
