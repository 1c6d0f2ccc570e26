"""`Refusal`, the error of a wrong command or input, for scripts that catch it."""

from .spec.refusal import Refusal

__all__ = ["Refusal"]
