"""Addresses, network interfaces and ports of this host."""

import contextlib
import fcntl
import socket
import struct
from pathlib import Path


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def is_free(port: int) -> bool:
    """Return True if rank 0 could listen on `port` of this host."""
    with contextlib.suppress(OSError, OverflowError), socket.create_server(("", port)):
        return True
    return False


def own_address(towards: str) -> str:
    """Return the address under which the host `towards` (name or address) sees this host.

    The result is "" if the address cannot be found.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(towards, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return probe.getsockname()[0]
    except OSError:
        return ""


def is_loopback(address: str) -> bool:
    """Return True for an address that no other host can reach.

    Debian's /etc/hosts assigns such an address to a host's own name.
    """
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"


def interface_to(address: str) -> str:
    """Return the network interface through which this host reaches a different host.

    The result is "" if `address` is this host itself, or if the interface cannot be found.
    """
    own = own_address(address).partition("%")[0]
    return "" if is_loopback(own) else interfaces().get(own.removeprefix("::ffff:"), "")


def interfaces() -> dict[str, str]:
    """Return a map of this host's IPv4 and IPv6 addresses to their network interfaces."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # this interface has no IPv4 address
                # SIOCGIFADDR
                packed = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))
                found[socket.inet_ntoa(packed[20:24])] = name
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            packed, *_, name = line.split()
            found[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(packed))] = name
    return found
