"""The recipes' shared code: `Recipe` defines a training run, and `run` starts it."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (told before a line that an older Python cannot run)
    found = f"{sys.executable} is Python {'.'.join(map(str, sys.version_info[:3]))}"
    sys.exit(
        f"refused: {found}: the recipes need 3.11 or newer. Activate the environment: ."
        " .venv/bin/activate (make setup makes it)"
    )

from .spec.shadows import refuse_shadows

refuse_shadows()  # must precede the first import of a module that a user's file can hide

from .run import run  # noqa: E402
from .spec.errors import report_config_errors  # noqa: E402
from .spec.recipe import Recipe  # noqa: E402

report_config_errors()

__all__ = ["Recipe", "run"]
