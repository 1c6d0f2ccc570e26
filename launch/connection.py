"""The connection to one host's agent.

The agent's output lines become events, and commands are written to its stdin.
"""

import contextlib
import json
import queue
import subprocess
import threading
from pathlib import Path
from typing import Any

from .errors import LaunchError

REPOSITORY = Path(__file__).resolve().parents[1]


class Connection:
    """A connection to a host's agent.

    It adds the agent's messages to `events` as (node, message). If the message is None, the
    connection has ended. Raises `LaunchError` if the agent cannot be started.
    """

    def __init__(self, node: int, argv: list[str], events: "queue.SimpleQueue[tuple[int, Any]]"):
        self.node = node
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "errors": "replace",
        }
        try:
            self.process = subprocess.Popen(argv, cwd=REPOSITORY, start_new_session=True, **pipes)
        except OSError as error:
            fix = {
                "ssh": "Install the OpenSSH client",
                "srun": "Start the job on a machine of the cluster",
            }.get(argv[0], "Give an interpreter with --python")
            raise LaunchError(f"{argv[0]} cannot be started: {error.strerror}. {fix}") from None
        self.errors: list[str] = []
        self.open = True
        self.events = events
        self.listening = [
            threading.Thread(target=target, daemon=True)
            for target in (self._listen, self._keep_errors)
        ]
        for thread in reversed(self.listening):  # the first thread joins the second
            thread.start()

    def _listen(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                self.errors.append(line.rstrip())  # printed by a login script
                continue
            self.events.put((self.node, message))
        self.listening[1].join(5)
        self.events.put((self.node, None))

    def _keep_errors(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.errors.append(line.rstrip())

    def send(self, **message: Any) -> None:
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def close(self) -> None:
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
