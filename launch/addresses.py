"""Finds the addresses, interfaces and ports of this host."""

import contextlib
import fcntl
import socket
import struct


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def own_address(towards: str) -> str:
    """Finds the address of this host that the host `towards` (name or address) sees; "" if that cannot be found out."""
    try:
        family, _, _, _, target = socket.getaddrinfo(towards, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return probe.getsockname()[0]
    except OSError:
        return ""


def interface_to(address: str) -> str:
    """Finds the network interface (of IPv4) through which this host reaches another; "" for the host itself, or if that cannot be found out."""
    if (own := own_address(address)).startswith("127."):  # as Debian's /etc/hosts has it of a host's own name: no other host comes that way
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                packed = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                if socket.inet_ntoa(packed[20:24]) == own:
                    return name
    return ""
