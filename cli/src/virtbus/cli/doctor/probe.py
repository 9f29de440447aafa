"""Runs commands with a time limit, and reads small files and sockets, for checks."""

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from virtbus.cli.doctor.finding import CheckResult, warn

TIMEOUT_S = 10.0


def run(command: Sequence[str], timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
    """Run a command; return its exit code, and its output to stdout and stderr.

    The code is 127 for a missing command, 126 if the command cannot start, 124 at the time limit.
    """
    try:
        ended = subprocess.run(  # noqa: S603  fixed commands, no shell
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout_s,
        )
    except FileNotFoundError:
        return 127, f"{command[0]} is not installed"
    except subprocess.TimeoutExpired:
        return 124, f"{command[0]} gave no answer in {timeout_s:g} s"
    except OSError as error:
        return 126, f"{command[0]}: {error.strerror}"
    return ended.returncode, ended.stdout.strip()


def needs_root(name: str, what: str) -> CheckResult:
    """Return a warning that a check needs root."""
    return warn(name, f"cannot be checked without root: {what}", "sudo virtbus doctor")


def is_root() -> bool:
    """Return True if this process is root. Its failures are then not due to missing rights."""
    return os.geteuid() == 0


def first_line(text: str) -> str:
    """Return the first non-empty line, stripped; empty if none."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def read(path: str | Path) -> str | None:
    """Return a small file's text; None if the file cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def unix_answers(path: str) -> str | None:
    """Connect to a UNIX socket; return the error's text, or None on success."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(2.0)
        try:
            sock.connect(path)
        except OSError as error:
            return error.strerror or str(error)
    return None
