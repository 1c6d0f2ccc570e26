"""Lists the accelerators that people rent, by the name that torch reports: peak of dense bf16
matrix products, memory, and its bandwidth.

From the vendors' data sheets (NVIDIA: A10, A10G on AWS, A100, GH200, H20, H100, H200, HGX B200, L4,
L40S, Ada whitepaper; AMD: MI300X), without sparsity, which doubles the figure that most data sheets
print first. The bandwidth is the sheets' peak. The memory is the nominal one in GiB; a program gets
up to 7 % less (ECC, the driver), so what exceeds the nominal memory certainly does not fit.
"""

import itertools
import re
from dataclasses import dataclass

from .refusal import refuse


@dataclass(frozen=True)
class Device:
    """Describes a device.

    `flops`: dense bf16 operations a second at the peak, a multiply-add counted as two. `memory` in
    bytes, `bandwidth` of it in bytes a second. `also`: other words that people use for the device.
    """

    flops: float
    memory: int
    bandwidth: float
    also: str = ""


def _device(teraflops: float, gib: int, terabytes: float, also: str = "") -> Device:
    return Device(teraflops * 1e12, gib * 2**30, terabytes * 1e12, f"{gib}gb {also}")


DEVICES = {
    "NVIDIA B200": _device(2250, 180, 8.0),
    "NVIDIA GH200 480GB": _device(989, 96, 4.0),
    "NVIDIA GH200 144G HBM3e": _device(989, 141, 4.9),
    "NVIDIA H200": _device(989, 141, 4.8, "sxm sxm5"),
    "NVIDIA H200 NVL": _device(835, 141, 4.8),
    "NVIDIA H100 80GB HBM3": _device(989, 80, 3.35, "sxm sxm5"),
    "NVIDIA H100 NVL": _device(835, 94, 3.9),
    "NVIDIA H100 PCIe": _device(756, 80, 2.0),
    "NVIDIA H20": _device(148, 96, 4.0),
    "NVIDIA A100-SXM4-80GB": _device(312, 80, 2.039),
    "NVIDIA A100-SXM4-40GB": _device(312, 40, 1.555),
    "NVIDIA A100 80GB PCIe": _device(312, 80, 1.935),
    "NVIDIA A100-PCIE-40GB": _device(312, 40, 1.555),
    "NVIDIA A10": _device(125, 24, 0.6),
    "NVIDIA A10G": _device(70, 24, 0.6),
    "NVIDIA L4": _device(121, 24, 0.3),
    "NVIDIA L40S": _device(362, 48, 0.864),
    "NVIDIA GeForce RTX 4090": _device(165, 24, 1.008),
    "AMD Instinct MI300X": _device(1307, 192, 5.3),
}


def device_called(name: str) -> tuple[str, Device]:
    """Return the device that a user means by "H200", "a100-sxm4-40gb" or "RTX4090".

    Raises `Refusal` with the names if the text fits no device, or several with unequal memory.
    """
    meant = _meant(name)
    # the shortest name: H200, not H200 NVL
    if len({DEVICES[known].memory for known in meant}) == 1:
        known = min(meant, key=len)
        return known, DEVICES[known]
    if not meant:
        raise refuse(
            f"--device {name}", "is not a known device", f"use one of {', '.join(DEVICES)}"
        )
    sizes = ", ".join(f"{known} ({DEVICES[known].memory >> 30} GiB)" for known in meant)
    names = " or ".join(f"--device {_distinct(name, known)}" for known in meant)
    raise refuse(
        f"--device {name}", f"is ambiguous, because it may be any of {sizes}", f"use {names}"
    )


def _meant(name: str) -> list[str]:
    """Return the devices that a text fits, by their full names."""
    text = "".join(_words(name))
    return [
        known
        for known, device in DEVICES.items()
        if text and _made_of(text, {*_words(f"{known} {device.also}")})
    ]


def _distinct(name: str, known: str) -> str:
    """Return `name` with as few words as make it fit one device only; the full name in quotes if no
    words do.
    """
    words = [
        word
        for word in _words(f"{DEVICES[known].also} {known}")
        if word not in "".join(_words(name))
    ]
    for count in (1, 2):
        for more in itertools.combinations(words, count):
            typed = "-".join([*name.split(), *more])
            if _meant(typed) == [known]:
                return typed
    return f'"{known}"'


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _made_of(text: str, words: set[str]) -> bool:
    """Returns True if the text is made of some of the words, each used once, with nothing between
    them.
    """
    return not text or any(
        _made_of(text.removeprefix(word), words - {word}) for word in words if text.startswith(word)
    )


def gib(size: int) -> str:
    """Format a number of bytes in GiB, or in MiB below one GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
