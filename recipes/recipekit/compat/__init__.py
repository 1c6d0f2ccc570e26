"""Workarounds for third-party code: attributes that we replace, and differences between releases.

One function replaces one attribute, and a context manager also restores it. Each docstring states
why the workaround exists, which version needs it, which test fails without it, and when it can be
removed. Libraries are imported inside the functions, so every module here is light.
"""
