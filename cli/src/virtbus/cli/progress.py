"""Prints steps and a status line to stderr while a command waits.

A terminal shows the steps, and redraws the last line with the current state. Without a terminal,
steps, reasons of waits and the progress of transfers are printed as lines.
"""

import os
import sys
import time
from typing import TextIO

from virtbus.cli import output, units

_BAR_CELLS = 24
_QUIET_BETWEEN_S = 5.0
_REDRAW_S = 0.1
_COLUMNS = 80
_CLEAR = "\r\x1b[2K"


class Steps:
    """Prints a line for each step, with the time since the start, and a status line below."""

    def __init__(self, *, shown: bool, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._shown = shown
        self._live = shown and output.redraws(self._stream)
        self._started = time.monotonic()
        self._status = ""
        self._drawn = 0.0
        self._progress_said = 0.0
        self._waits = ""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def restart_clock(self) -> None:
        self._started = time.monotonic()

    def step(self, what: str, detail: str = "") -> None:
        if not self._shown:
            return
        at = output.paint(f"{self.elapsed_s:8.3f} s", "2", self._stream)
        text = f"{at}  {output.safe(what):<18}  {output.safe(detail)}".rstrip()
        self._stream.write(f"{_CLEAR if self._live else ''}{text}\n")
        self._drawn = 0.0
        self._draw()

    def status(self, text: str) -> None:
        self._status = output.safe(text)
        self._draw()

    def transfer(self, what: str, done: int, total: int | None) -> None:
        """Show the progress of a transfer as a bar. Without a terminal, print it every 5 s."""
        if not done:
            return
        text = bar(what, done, total)
        if self._live:
            self.status(text)
        elif self._shown and time.monotonic() - self._progress_said > _QUIET_BETWEEN_S:
            self._progress_said = time.monotonic()
            self._stream.write(f"{text}\n")

    def wait(self, why: str) -> None:
        """Show the reason for a wait in the status line. Without a terminal, print a new reason."""
        if self._live:
            self.status(why)
        elif self._shown and why != self._waits:
            self._stream.write(f"waits: {output.safe(why)}\n")
            self._stream.flush()
        self._waits = why

    def tick(self) -> None:
        self._draw()

    def close(self) -> None:
        if self._live:
            self._stream.write(_CLEAR)
            self._stream.flush()

    def _draw(self) -> None:
        now = time.monotonic()
        if not self._live or not self._status or now - self._drawn < _REDRAW_S:
            return
        self._drawn = now
        width = _columns() - 1
        line = f"{self.elapsed_s:8.1f} s  {self._status}"[:width]
        self._stream.write(f"{_CLEAR}{line}")
        self._stream.flush()


def bar(what: str, done: int, total: int | None) -> str:
    """Return `what [#####.....] 42 % 12MiB of 30MiB`, or `what 12MiB` if the total is unknown."""
    if not total:
        return f"{what}  {units.size(done)}"
    part = min(1.0, done / total)
    cells = int(part * _BAR_CELLS)
    drawn = "#" * cells + "." * (_BAR_CELLS - cells)
    return f"{what}  [{drawn}] {part * 100:3.0f} %  {units.size(done)} of {units.size(total)}"


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS
    except (OSError, ValueError):
        return _COLUMNS
