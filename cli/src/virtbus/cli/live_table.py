"""Shows a changing table: redrawn on a terminal, elsewhere as one line for each final row."""

import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TextIO

from virtbus.cli import output

_REDRAW_S = 0.2
_FINAL = ("ready", "failed")
"""States, in the second column, after which a row no longer changes."""
_SCREEN = (80, 24)


class LiveTable:
    """Draws rows of (name, state, …) to stderr. Without a terminal, it prints each final row."""

    def __init__(self, header: Sequence[str], *, shown: bool, stream: TextIO | None = None) -> None:
        self._header = header
        self._stream = stream or sys.stderr
        self._shown = shown
        self._live = shown and output.redraws(self._stream)
        self._lines = 0
        self._drawn_s = 0.0
        self._printed: set[str] = set()

    def show(self, rows: Iterable[Sequence[str]]) -> None:
        """Show the current rows. A terminal shows the rows that fit, at most every _REDRAW_S."""
        if self._live and time.monotonic() - self._drawn_s >= _REDRAW_S:
            self._draw([*rows])
        elif self._shown and not self._live:
            for row in rows:
                if row[1] in _FINAL and row[0] not in self._printed:
                    self._printed.add(row[0])
                    words = " ".join(output.safe(cell) for cell in row if cell not in {"", "-"})
                    self._stream.write(f"{words}\n")

    def close(self) -> None:
        self._erase()
        self._stream.flush()

    def _draw(self, rows: list[Sequence[str]]) -> None:
        columns, lines = self._screen()
        room = lines - 3  # without the lines of the header, of "and N more", and of the cursor
        text = output.table(self._header, rows[:room], self._stream).split("\n")
        if len(rows) > room:
            text.append(f"and {len(rows) - room} more")
        self._erase()
        self._stream.write("".join(f"{line[: columns - 1]}\n" for line in text))
        self._stream.flush()
        self._lines, self._drawn_s = len(text), time.monotonic()

    def _erase(self) -> None:
        if self._lines:
            self._stream.write(f"\x1b[{self._lines}F\x1b[J")
            self._lines = 0

    def _screen(self) -> tuple[int, int]:
        try:
            columns, lines = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            return _SCREEN
        return columns or _SCREEN[0], max(lines or _SCREEN[1], 5)
