"""The standard output of launch: text and, on a terminal, rank 0's progress line below the text."""

import os
import sys


class Screen:
    """Standard output of this process."""

    def __init__(self) -> None:
        self._line = ""  # the progress line of rank 0
        # _shown: the progress line is on the terminal. _unended: the text does not end with a line
        # break.
        self._shown = self._unended = False

    def columns(self) -> int:
        """Return the width of the terminal.

        The width is 0 if standard output is not a terminal that can redraw a line.
        """
        if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
            return 0
        try:
            return os.get_terminal_size(sys.stdout.fileno()).columns or 80
        except OSError:  # the terminal is gone
            return 0

    def write(self, text: str) -> None:
        """Print text above the progress line."""
        if text:
            self._put(text)

    def draw(self, line: str) -> None:
        """Replace the progress line with `line`, shortened to the terminal's current width.

        "" removes the progress line.
        """
        self._line = line
        self._put("")

    def _put(self, text: str) -> None:
        erased = "\r\x1b[2K" if self._shown else ""
        self._unended = not text.endswith("\n") if text else self._unended
        line = "" if self._unended else self._line[: max(0, self.columns() - 1)]
        self._shown = bool(line)
        if erased or text or line:
            sys.stdout.write(erased + text + line)
            sys.stdout.flush()


SCREEN = Screen()
