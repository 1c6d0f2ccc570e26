"""UTF-8 as the encoding of every text file, whatever the locale. Imports nothing heavy."""

import io
import locale
import os
import sys
from pathlib import Path

from .refusal import refuse

AGAIN = "RECIPEKIT_LOCALE"  # set for the second start: the encoding of the locale


def use_utf8() -> list[str]:
    """Start this program again in Python's UTF-8 mode if its locale has another encoding; return a
    line if that has happened.

    torch 2.13 cannot be imported where text is ASCII (UnicodeDecodeError), and in ISO-8859-1 every
    library reads UTF-8 files as other letters. The process, its parent and its rank stay. Raises
    `Refusal` if the program cannot be started again.

    What UTF-8 cannot encode (half a surrogate pair of a JSON, a byte of a file's name) is printed
    as an escape.
    """
    encoding, again = locale.getencoding(), os.environ.get(AGAIN, "")
    if not sys.flags.utf8_mode and encoding.lower().replace("-", "") != "utf8":
        if again or not Path(sys.argv[0]).is_file():
            rule = f"its text encoding is {encoding}, but it must be UTF-8"
            raise refuse("locale", rule, "set LC_ALL=C.UTF-8, or start Python with -X utf8")
        os.environ |= {"PYTHONUTF8": "1", AGAIN: encoding}
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # which is what stderr does already
    return (
        [f"locale: its text is {again}. This program reads and writes UTF-8 all the same"]
        if again
        else []
    )
