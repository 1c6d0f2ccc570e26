"""Specifications of accelerators that can be rented, keyed by the name that torch reports.

Each entry lists the peak rate of dense bf16 matrix products, the memory size and the peak memory
bandwidth. The values come from the vendors' data sheets (NVIDIA: A10, A10G on AWS, A100, GH200,
H20, H100, H200, HGX B200, L4, L40S, Ada whitepaper; AMD: MI300X). They exclude sparsity, which
doubles the figure that most data sheets print first.

The memory size is nominal, in GiB. Up to 7 % of it is unavailable to a program (ECC, the driver),
so anything larger than the nominal size certainly does not fit.
"""

import itertools
import re
from dataclasses import dataclass

from .errors import config_error


@dataclass(frozen=True)
class Device:
    """Specification of a device.

    `flops` is the peak number of dense bf16 operations per second; a multiply-add counts as two.
    `memory` is in bytes, `bandwidth` in bytes per second. `aliases` are other names for the device.
    """

    flops: float
    memory: int
    bandwidth: float
    aliases: str = ""


def _device_spec(teraflops: float, gib: int, terabytes: float, also: str = "") -> Device:
    return Device(teraflops * 1e12, gib * 2**30, terabytes * 1e12, f"{gib}gb {also}")


DEVICES = {
    "NVIDIA B200": _device_spec(2250, 180, 8.0),
    "NVIDIA GH200 480GB": _device_spec(989, 96, 4.0),
    "NVIDIA GH200 144G HBM3e": _device_spec(989, 141, 4.9),
    "NVIDIA H200": _device_spec(989, 141, 4.8, "sxm sxm5"),
    "NVIDIA H200 NVL": _device_spec(835, 141, 4.8),
    "NVIDIA H100 80GB HBM3": _device_spec(989, 80, 3.35, "sxm sxm5"),
    "NVIDIA H100 NVL": _device_spec(835, 94, 3.9),
    "NVIDIA H100 PCIe": _device_spec(756, 80, 2.0),
    "NVIDIA H20": _device_spec(148, 96, 4.0),
    "NVIDIA A100-SXM4-80GB": _device_spec(312, 80, 2.039),
    "NVIDIA A100-SXM4-40GB": _device_spec(312, 40, 1.555),
    "NVIDIA A100 80GB PCIe": _device_spec(312, 80, 1.935),
    "NVIDIA A100-PCIE-40GB": _device_spec(312, 40, 1.555),
    "NVIDIA A10": _device_spec(125, 24, 0.6),
    "NVIDIA A10G": _device_spec(70, 24, 0.6),
    "NVIDIA L4": _device_spec(121, 24, 0.3),
    "NVIDIA L40S": _device_spec(362, 48, 0.864),
    "NVIDIA GeForce RTX 4090": _device_spec(165, 24, 1.008),
    "AMD Instinct MI300X": _device_spec(1307, 192, 5.3),
}


def find_device(name: str) -> tuple[str, Device]:
    """Return the device that a user means by "H200", "a100-sxm4-40gb" or "RTX4090".

    Raise `ConfigError` with the possible names if the text matches no device, or matches devices
    with different memory sizes.
    """
    meant = _matching_devices(name)
    # Use the shortest name: H200 rather than H200 NVL.
    if len({DEVICES[known].memory for known in meant}) == 1:
        known = min(meant, key=len)
        return known, DEVICES[known]
    if not meant:
        raise config_error(
            f"--device {name}", "is not a known device", f"use one of {', '.join(DEVICES)}"
        )
    sizes = ", ".join(f"{known} ({DEVICES[known].memory >> 30} GiB)" for known in meant)
    names = " or ".join(f"--device {_shortest_name(name, known)}" for known in meant)
    raise config_error(
        f"--device {name}", f"is ambiguous, because it may be any of {sizes}", f"use {names}"
    )


def _matching_devices(name: str) -> list[str]:
    """Return the full names of the devices that match a text."""
    text = "".join(_words(name))
    return [
        known
        for known, device in DEVICES.items()
        if text and _is_made_of(text, {*_words(f"{known} {device.aliases}")})
    ]


def _shortest_name(name: str, known: str) -> str:
    """Return `name` plus the fewest extra words with which it matches only the device `known`.

    If no extra words suffice, return the full name in quotes.
    """
    words = [
        word
        for word in _words(f"{DEVICES[known].aliases} {known}")
        if word not in "".join(_words(name))
    ]
    for count in (1, 2):
        for more in itertools.combinations(words, count):
            typed = "-".join([*name.split(), *more])
            if _matching_devices(typed) == [known]:
                return typed
    return f'"{known}"'


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _is_made_of(text: str, parts: set[str]) -> bool:
    """Return True if the text is a concatenation of distinct words from `parts`."""
    return not text or any(
        _is_made_of(text.removeprefix(word), parts - {word})
        for word in parts
        if text.startswith(word)
    )


def gib(size: int) -> str:
    """Format a number of bytes in GiB, or in MiB if it is below one GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
