"""Reports from all ranks to rank 0 over plain sockets.

Every wait has a deadline. If a rank is missing, silent or gone, it is reported, and no rank waits
for it any longer.

This module needs only the standard library, so that it works even if torch or the network between
the hosts does not.
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

from ..spec.errors import config_error

# Rank 0 listens on the first free port among this many ports next to the master port. The master
# port itself is reserved for the launcher and torch.
NUM_CANDIDATE_PORTS = 8
GREETING_SECONDS = 2.0  # seconds for a greeting; a peer that does not greet is a different program
MAX_MESSAGE_BYTES = 1 << 26  # maximum size of a message in bytes


class JsonConnection:
    """A connection that carries one JSON value per line."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""

    def send(self, value: object) -> None:
        """Send a value. Raises OSError if the other end is gone, or reads nothing for 10 s."""
        self.connection.settimeout(10)
        self.connection.sendall(json.dumps(value).encode() + b"\n")

    def receive(self, seconds: float) -> Any:
        """Read the next value.

        Raises OSError if no value arrives in time, and ValueError if the value is not JSON.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            self.connection.settimeout(max(0.01, deadline - time.monotonic()))
            part = self.connection.recv(1 << 16)
            if not part:
                raise ConnectionError("it closed the connection")
            self._buffer += part
            if len(self._buffer) > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of more than {MAX_MESSAGE_BYTES} bytes")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


class Coordinator:
    """Rank 0's end of the rendezvous. `lost` maps each missing rank to the reason."""

    def __init__(self, world: int, lines: dict[int, JsonConnection], lost: dict[int, str], id: str):
        self.world, self.lost, self.id = world, lost, id
        self._lines = lines

    def _drop(self, rank: int, why: str) -> None:
        self._lines.pop(rank).connection.close()
        self.lost[rank] = why

    def gather(self, local_value: object, seconds: float, description: str) -> dict[int, Any]:
        """Collect the value that each rank reports, as {rank: value}.

        A rank that is silent for `seconds` is treated as lost. `description` names the value in
        that rank's error message.
        """
        found = {0: local_value}
        deadline = time.monotonic() + seconds
        for rank, line in list(self._lines.items()):
            try:
                found[rank] = line.receive(max(0.05, deadline - time.monotonic()))
            except TimeoutError:
                self._drop(rank, f"did not report {description} within {seconds:.0f} s")
            except (OSError, ValueError) as error:
                self._drop(rank, f"ended while it was asked for {description} ({error})")
        return found

    def broadcast(self, value: object) -> None:
        """Send a value to all connected ranks."""
        for rank, line in list(self._lines.items()):
            try:
                line.send({"told": value})
            except OSError as error:
                self._drop(rank, f"cannot be written to ({error})")

    def measure_clocks(self, times: int = 5) -> dict[int, tuple[float, float]]:
        """Measure the clocks of ranks that are waiting in `receive`.

        Return rank -> (seconds by which its clock is ahead of this clock, round trip in seconds).
        """
        found = {}
        for rank, line in list(self._lines.items()):
            trips: list[tuple[float, float]] = []
            try:
                for _ in range(times):
                    sent, begun = time.time(), time.perf_counter()
                    line.send({"clock": True})
                    theirs = line.receive(5)
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
    """The end of any rank other than 0. Every call raises `ConfigError` if rank 0 is gone."""

    def __init__(self, connection: JsonConnection, id: str):
        self.id = id
        self.own_address: str = connection.connection.getsockname()[0]
        self.coordinator_address: str = connection.connection.getpeername()[0]
        self._line = connection

    def gather(self, local_value: object) -> None:
        """Report a value to rank 0."""
        try:
            self._line.send(local_value)
        except OSError as error:
            raise self._coordinator_lost(error) from None

    def receive(self, seconds: float) -> Any:
        """Return the next value that rank 0 sends to all ranks.

        Clock requests from rank 0 are answered in the meantime.
        """
        while True:
            try:
                message = self._line.receive(seconds)
                if "told" in message:
                    return message["told"]
                self._line.send(time.time())
            except (OSError, ValueError) as error:
                raise self._coordinator_lost(error) from None

    def _coordinator_lost(self, error: Exception) -> Exception:
        return config_error(
            f"rank 0 at {self.coordinator_address}",
            f"stopped answering ({error})",
            "check the output of rank 0",
        )

    def close(self) -> None:
        self._line.connection.close()


def join_rendezvous(
    rank: int, world: int, address: str, port: int, patience: float
) -> Coordinator | Member:
    """Join the rendezvous of `world` ranks.

    Rank 0 waits at most `patience` seconds for the other ranks. The other ranks wait slightly
    longer for rank 0. Raises `ConfigError` if rank 0 cannot be reached, or finds no port to listen
    on.
    """
    key = f"{address}:{port}:{world}"  # several jobs may use neighbouring ports
    return (
        _accept_members(world, port, key, patience)
        if rank == 0
        else _connect_member(rank, address, port, key, 1.5 * patience)
    )


def _accept_members(world: int, port: int, job_key: str, patience: float) -> Coordinator:
    listener, id = None, secrets.token_hex(4)
    for candidate in candidate_ports(port):
        with contextlib.suppress(OSError):
            listener = open_listener(candidate)
            break
    if listener is None:
        raise config_error(
            f"ports {_port_range(port)} of rank 0", "are all in use", "choose another master port"
        )
    lines: dict[int, JsonConnection] = {}
    deadline = time.monotonic() + patience
    with listener:
        while len(lines) < world - 1 and time.monotonic() < deadline:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                line = JsonConnection(listener.accept()[0])
            except TimeoutError:
                break
            try:
                greeting = line.receive(GREETING_SECONDS)
                if greeting["key"] != job_key or greeting["rank"] in lines:
                    raise ValueError("not of this job")
                line.send({"id": id})
                # This fails at once if that rank has already hung up in order to greet again.
                line.receive(5 * GREETING_SECONDS)
                lines[greeting["rank"]] = line
            except (OSError, ValueError, KeyError, TypeError):
                line.connection.close()
    absent = {
        rank: f"did not come within {patience:.0f} s"
        for rank in range(1, world)
        if rank not in lines
    }
    return Coordinator(world, dict(sorted(lines.items())), absent, id)


def _connect_member(rank: int, address: str, port: int, job_key: str, patience: float) -> Member:
    deadline, why = time.monotonic() + patience, "no answer"
    while time.monotonic() < deadline:
        for candidate in candidate_ports(port):
            try:
                line = JsonConnection(
                    socket.create_connection(
                        (address, candidate),
                        timeout=max(0.1, min(GREETING_SECONDS, deadline - time.monotonic())),
                    )
                )
            except OSError as error:
                why = error.strerror or str(error)
                if time.monotonic() > deadline:
                    break
                continue
            try:
                line.send({"key": job_key, "rank": rank})
                id = line.receive(GREETING_SECONDS)["id"]
                line.send("here")
                return Member(line, id)
            except (OSError, ValueError, KeyError, TypeError):  # a different program or job
                line.connection.close()
        time.sleep(0.1)
    raise config_error(
        f"rank 0 at {address}, ports {_port_range(port)}",
        f"cannot be reached from rank {rank} on {socket.gethostname()} ({why})",
        "check the address, that rank 0 was started, and that no firewall blocks the hosts",
    )


def candidate_ports(port: int) -> range:
    """List the ports next to the master port on which rank 0 may listen."""
    return (
        range(port + 1, port + 1 + NUM_CANDIDATE_PORTS)
        if port + NUM_CANDIDATE_PORTS < 65536
        else range(port - NUM_CANDIDATE_PORTS, port)
    )


def _port_range(port: int) -> str:
    return f"{candidate_ports(port)[0]} to {candidate_ports(port)[-1]}"


def open_listener(port: int) -> socket.socket:
    """Open a socket that listens on all addresses of this host. Port 0 selects a free port.

    Raises OSError if the port is in use.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    return socket.create_server(("", port), backlog=1024)


def start_echo_server() -> socket.socket:
    """Open a listening socket whose connections echo everything that they receive.

    Threads serve the connections until the socket is closed.
    """
    listener = open_listener(0)

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


def measure_round_trips(
    addresses: dict[int, tuple[str, int]], timeout: float
) -> dict[int, float | str]:
    """Connect to each address within `timeout`, and measure the round trips.

    Return rank -> round trip in seconds, or the reason why the rank cannot be reached.
    """

    def ping(address: tuple[str, int]) -> float | str:
        try:
            with socket.create_connection(address, timeout=timeout) as connection:
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
