"""Versions as two NVIDIA drivers report them."""

OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build "
    " (dvs-builder@U22)\nGCC version:  gcc version 12.3.0\n"
)
CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC"
    " version:  gcc version 11.4.0\n"
)
