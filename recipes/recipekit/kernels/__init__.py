"""Kernels: the computations that run on the device."""
