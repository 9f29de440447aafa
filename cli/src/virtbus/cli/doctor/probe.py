"""How checks look: commands with a deadline, small files, sockets."""

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from virtbus.cli.doctor.finding import Finding, warn

TIMEOUT_S = 10.0


def run(command: Sequence[str], timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
    """Exit code and output of a command; 127 where it is missing, 124 where it hangs."""
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


def needs_root(name: str, what: str) -> Finding:
    """The finding where only the rights to look are missing."""
    return warn(name, f"cannot be checked without root: {what}", "sudo virtbus doctor")


def is_root() -> bool:
    """Whether failures are not just for want of rights."""
    return os.geteuid() == 0


def first_line(text: str) -> str:
    """The first line that is not empty."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def read(path: str | Path) -> str | None:
    """A small file's text, None where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def unix_answers(path: str) -> str | None:
    """None when something listens on a unix socket, else why not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(2.0)
        try:
            sock.connect(path)
        except OSError as error:
            return error.strerror or str(error)
    return None
