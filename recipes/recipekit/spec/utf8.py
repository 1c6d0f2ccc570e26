"""UTF-8 as the encoding of every text file, in every locale.

This module imports nothing heavy.
"""

import io
import locale
import os
import sys
from pathlib import Path

from .errors import config_error

LOCALE_VARIABLE = "RECIPEKIT_LOCALE"  # set for the restarted program: the encoding of the locale


def use_utf8() -> list[str]:
    """Restart this program in Python's UTF-8 mode if its locale has a different encoding.

    Return a line that reports the restart, or [] if there was none. The process, its parent and its
    rank stay the same. Raise `ConfigError` if the program cannot be restarted.

    torch 2.13 cannot be imported if the text encoding is ASCII (UnicodeDecodeError). With
    ISO-8859-1, every library decodes UTF-8 files incorrectly.

    Characters that UTF-8 cannot encode are printed as escapes. Examples are half of a surrogate
    pair in a JSON and an undecodable byte in a file name.
    """
    encoding, again = locale.getencoding(), os.environ.get(LOCALE_VARIABLE, "")
    if not sys.flags.utf8_mode and encoding.lower().replace("-", "") != "utf8":
        if again or not Path(sys.argv[0]).is_file():
            rule = f"its text encoding is {encoding}, but it must be UTF-8"
            raise config_error("locale", rule, "set LC_ALL=C.UTF-8, or start Python with -X utf8")
        os.environ |= {"PYTHONUTF8": "1", LOCALE_VARIABLE: encoding}
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr already does
    return (
        [f"locale: its text is {again}. This program reads and writes UTF-8 all the same"]
        if again
        else []
    )
