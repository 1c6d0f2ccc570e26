"""Lets ranks report to rank 0 over plain sockets.

Every wait has a deadline: a rank that is missing, silent or gone is named, never waited for.

This module needs the standard library only, so that it works where torch or the network between the
hosts does not.
"""

import contextlib
import json
import secrets
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..spec.refusal import refuse

# rank 0 listens on the first free one of so many ports beside the master port, which belongs to the
# launcher and torch
PORTS = 8
ANSWER = 2.0  # seconds for a greeting; whoever does not greet is another program
LONGEST = 1 << 26  # bytes of a message


class Line:
    """Wraps a connection that carries one JSON value a line."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = b""

    def send(self, value: Any) -> None:
        """Sends a value. Raises OSError if the other end is gone, or reads nothing for 10 s."""
        self.connection.settimeout(10)
        self.connection.sendall(json.dumps(value).encode() + b"\n")

    def read(self, seconds: float) -> Any:
        """Reads the next value. Raises OSError if none comes in time, ValueError if it is not
        JSON.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._read:
            self.connection.settimeout(max(0.01, deadline - time.monotonic()))
            part = self.connection.recv(1 << 16)
            if not part:
                raise ConnectionError("it closed the connection")
            self._read += part
            if len(self._read) > LONGEST:
                raise ValueError(f"a message of more than {LONGEST} bytes")
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)


class Chair:
    """Holds rank 0's end of the meeting. `lost`: rank -> why it is not there."""

    def __init__(self, world: int, lines: dict[int, Line], lost: dict[int, str], id: str):
        self.world, self.lost, self.id = world, lost, id
        self._lines = lines

    def _drop(self, rank: int, why: str) -> None:
        self._lines.pop(rank).connection.close()
        self.lost[rank] = why

    def gather(self, own: Any, seconds: float, about: str) -> dict[int, Any]:
        """Collects {rank: what it reported}. A rank that is silent for `seconds` is lost; `about`
        names what was asked for.
        """
        found = {0: own}
        deadline = time.monotonic() + seconds
        for rank, line in list(self._lines.items()):
            try:
                found[rank] = line.read(max(0.05, deadline - time.monotonic()))
            except TimeoutError:
                self._drop(rank, f"did not report {about} within {seconds:.0f} s")
            except (OSError, ValueError) as error:
                self._drop(rank, f"ended while it was asked for {about} ({error})")
        return found

    def tell(self, value: Any) -> None:
        """Sends a value to all ranks that are there."""
        for rank, line in list(self._lines.items()):
            try:
                line.send({"told": value})
            except OSError as error:
                self._drop(rank, f"cannot be written to ({error})")

    def clocks(self, times: int = 5) -> dict[int, tuple[float, float]]:
        """Measures the clocks of ranks that wait in `hear`: rank -> (seconds that its clock is
        ahead of this one, round trip in seconds).
        """
        found = {}
        for rank, line in list(self._lines.items()):
            trips: list[tuple[float, float]] = []
            try:
                for _ in range(times):
                    sent, begun = time.time(), time.perf_counter()
                    line.send({"clock": True})
                    theirs = line.read(5)
                    trip = time.perf_counter() - begun
                    trips.append((trip, theirs - sent - trip / 2))
                trip, ahead = min(trips)
                found[rank] = (ahead, trip)
            except (OSError, ValueError) as error:
                self._drop(rank, f"did not report its clock ({error})")
        return found

    def close(self) -> None:
        for line in self._lines.values():
            line.connection.close()


class Member:
    """Holds the end of any other rank. Every call raises `Refusal` if rank 0 is gone."""

    def __init__(self, line: Line, id: str):
        self.id = id
        self.own_address: str = line.connection.getsockname()[0]
        self.chair_address: str = line.connection.getpeername()[0]
        self._line = line

    def gather(self, own: Any) -> None:
        """Reports a value to rank 0."""
        try:
            self._line.send(own)
        except OSError as error:
            raise self._gone(error) from None

    def hear(self, seconds: float) -> Any:
        """Returns the next value that rank 0 sends to all ranks; answers questions for the clock
        meanwhile.
        """
        while True:
            try:
                message = self._line.read(seconds)
                if "told" in message:
                    return message["told"]
                self._line.send(time.time())
            except (OSError, ValueError) as error:
                raise self._gone(error) from None

    def _gone(self, error: Exception) -> Exception:
        return refuse(
            f"rank 0 at {self.chair_address}",
            f"stopped answering ({error})",
            "check the output of rank 0",
        )

    def close(self) -> None:
        self._line.connection.close()


def meet(rank: int, world: int, address: str, port: int, patience: float) -> Chair | Member:
    """Joins the meeting of `world` ranks; rank 0 waits at most `patience` seconds for the others,
    and the others a little longer for rank 0.

    Raises `Refusal` if rank 0 cannot be reached, or has no port to listen on.
    """
    key = f"{address}:{port}:{world}"  # several jobs may have neighbouring ports
    return (
        _chair(world, port, key, patience)
        if rank == 0
        else _member(rank, address, port, key, 1.5 * patience)
    )


def _chair(world: int, port: int, key: str, patience: float) -> Chair:
    listener, id = None, secrets.token_hex(4)
    for candidate in beside(port):
        with contextlib.suppress(OSError):
            listener = listen(candidate)
            break
    if listener is None:
        raise refuse(
            f"ports {_span(port)} of rank 0", "are all in use", "choose another master port"
        )
    lines: dict[int, Line] = {}
    deadline = time.monotonic() + patience
    with listener:
        while len(lines) < world - 1 and time.monotonic() < deadline:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                line = Line(listener.accept()[0])
            except TimeoutError:
                break
            try:
                greeting = line.read(ANSWER)
                if greeting["key"] != key or greeting["rank"] in lines:
                    raise ValueError("not of this job")
                line.send({"id": id})
                # fails at once if that rank has hung up meanwhile, in order to greet again
                line.read(5 * ANSWER)
                lines[greeting["rank"]] = line
            except (OSError, ValueError, KeyError, TypeError):
                line.connection.close()
    absent = {
        rank: f"did not come within {patience:.0f} s"
        for rank in range(1, world)
        if rank not in lines
    }
    return Chair(world, dict(sorted(lines.items())), absent, id)


def _member(rank: int, address: str, port: int, key: str, patience: float) -> Member:
    deadline, why = time.monotonic() + patience, "no answer"
    while time.monotonic() < deadline:
        for candidate in beside(port):
            try:
                line = Line(
                    socket.create_connection(
                        (address, candidate),
                        timeout=max(0.1, min(ANSWER, deadline - time.monotonic())),
                    )
                )
            except OSError as error:
                why = error.strerror or str(error)
                if time.monotonic() > deadline:
                    break
                continue
            try:
                line.send({"key": key, "rank": rank})
                id = line.read(ANSWER)["id"]
                line.send("here")
                return Member(line, id)
            except (OSError, ValueError, KeyError, TypeError):  # another program, or another job
                line.connection.close()
        time.sleep(0.1)
    raise refuse(
        f"rank 0 at {address}, ports {_span(port)}",
        f"cannot be reached from rank {rank} on {socket.gethostname()} ({why})",
        "check the address, that rank 0 was started, and that no firewall blocks the hosts",
    )


def beside(port: int) -> range:
    """Lists the ports next to the master port on which rank 0 may listen."""
    return range(port + 1, port + 1 + PORTS) if port + PORTS < 65536 else range(port - PORTS, port)


def _span(port: int) -> str:
    return f"{beside(port)[0]} to {beside(port)[-1]}"


def listen(port: int) -> socket.socket:
    """Opens a socket that listens on all addresses of this host; port 0 takes a free one.

    Raises OSError if the port is in use.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    return socket.create_server(("", port), backlog=1024)


def echo() -> socket.socket:
    """Opens a listening socket that sends back, from threads, what its connections send, until the
    socket is closed.
    """
    listener = listen(0)

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(30)
            while data := connection.recv(4096):
                connection.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):  # the socket was closed
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener


def reach(addresses: dict[int, tuple[str, int]], seconds: float) -> dict[int, float | str]:
    """Connects to each address, for at most `seconds`: rank -> round trip in seconds, or why the
    rank cannot be reached.
    """

    def ping(address: tuple[str, int]) -> float | str:
        try:
            with socket.create_connection(address, timeout=seconds) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                trips = []
                for _ in range(3):
                    begun = time.perf_counter()
                    connection.sendall(b"ping")
                    if not connection.recv(4):
                        return "closed the connection"
                    trips.append(time.perf_counter() - begun)
                return statistics.median(trips)
        except OSError as error:
            return error.strerror or str(error)

    with ThreadPoolExecutor(32) as pool:
        return dict(zip(addresses, pool.map(ping, addresses.values()), strict=True))
