"""The shared code of the recipes: `Recipe` says what to train, `run` trains it."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (told before a line that an older Python cannot run)
    found = f"{sys.executable} is Python {'.'.join(map(str, sys.version_info[:3]))}"
    sys.exit(
        f"refused: {found}: the recipes need 3.11 or newer. Activate the environment: ."
        " .venv/bin/activate (make setup makes it)"
    )

from .spec.shadows import refuse_shadows

refuse_shadows()  # before the first import of a module that a file of the user can hide

from .run import run  # noqa: E402
from .spec.recipe import Recipe  # noqa: E402
from .spec.refusal import report_refusals  # noqa: E402

report_refusals()

__all__ = ["Recipe", "run"]
