"""`Refusal`, the former name of `ConfigError`, for scripts that import it from this module."""

from .spec.errors import ConfigError as Refusal

__all__ = ["Refusal"]
