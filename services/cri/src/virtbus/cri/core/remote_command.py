"""Defines the streams of exec and attach: their names, and the status that ends them.

In SPDY, each name is a stream. In a websocket, each name is a numbered channel.
"""

import json
import re
from typing import NamedTuple

from virtbus.cri.core.answers import Plain

SPDY_PROTOCOL = "v4.channel.k8s.io"
WEBSOCKET_PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
"""Only v5 has a message that ends one channel (CLOSE_CHANNEL)."""
STDIN, STDOUT, STDERR, ERROR, RESIZE = "stdin", "stdout", "stderr", "error", "resize"
CHANNELS = (STDIN, STDOUT, STDERR, ERROR, RESIZE)
"""The names of the channels, by number of the channel."""
CLOSE_CHANNEL = 255
SIZE_BYTES = 1024
"""Maximum length of an incomplete JSON object with the size of a terminal."""
_OBJECT = re.compile(rb"\{[^{}]{0,200}\}")


class Wanted(NamedTuple):
    """The streams that a request asks for, and `tty` for a terminal."""

    stdin: bool = False
    stdout: bool = False
    stderr: bool = False
    tty: bool = False

    @property
    def names(self) -> frozenset[str]:
        chosen = {STDIN: self.stdin, STDOUT: self.stdout, STDERR: self.stderr, RESIZE: self.tty}
        return frozenset({ERROR, *(name for name, wanted in chosen.items() if wanted)})


class Size(NamedTuple):
    """The size of the client's terminal, in characters."""

    columns: int
    rows: int


class SizeReader:
    """Reads sizes, one JSON object after another, from the pieces of the stream `resize`."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Size | None:
        """Return the latest valid size that `data` completes, or None."""
        text = self._rest + data
        objects = list(_OBJECT.finditer(text))
        self._rest = text[objects[-1].end() if objects else 0 :][-SIZE_BYTES:]
        found = None
        for one in objects:
            found = _size(one[0]) or found
        return found


def _size(text: bytes) -> Size | None:
    try:
        value = json.loads(text)
        found = Size(int(value["Width"]), int(value["Height"]))
    except (ValueError, TypeError, KeyError):
        return None
    return found if min(found) > 0 and max(found) < 2**16 else None


def succeeded() -> bytes:
    """Return the status of an ended attach, or of a command that ended with exit code 0."""
    return _status({"status": "Success"})


def exited(exit_code: int) -> bytes:
    """Return the status of a command that ended with another exit code."""
    message = f"command terminated with non-zero exit code: {exit_code}"
    cause = {"reason": "ExitCode", "message": str(exit_code)}
    details = {"causes": [cause]}
    told: Plain = {"status": "Failure", "reason": "NonZeroExitCode", "message": message}
    return _status(told | {"details": details})


def failed(message: str) -> bytes:
    """Return the status of a session that could not be served."""
    return _status(
        {"status": "Failure", "reason": "InternalError", "code": 500, "message": message}
    )


def _status(fields: Plain) -> bytes:
    return json.dumps({"metadata": {}, **fields}).encode()
