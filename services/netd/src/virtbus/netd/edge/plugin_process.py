"""One run of a CNI plugin: its own session, bounded in time and output, nothing left behind.

In a worker thread with plain pipes: asyncio's subprocess cannot let go of a pipe that an escaped
child keeps open, and starts a thread per process anyway.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `fault` says why it was killed, empty when it ended by itself."""

    code: int
    output: bytes
    errors: bytes
    fault: str = ""


class PluginProcess:
    """`run` blocks; `kill` may be called from another thread meanwhile."""

    def __init__(
        self,
        path: str,
        environment: Mapping[str, str],
        given: bytes,
        *,
        timeout_s: float,
        max_bytes: int,
    ) -> None:
        self._path = path
        self._environment = environment
        self._given = given
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._killed = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> Outcome:
        """Run the plugin to its end, or to ours.

        Raises:
            OSError: it cannot be started.
        """
        stdin = os.memfd_create("cni")
        try:
            os.write(stdin, self._given)
            os.lseek(stdin, 0, os.SEEK_SET)
            self._process = subprocess.Popen(  # noqa: S603  # named by the node's own conflist
                [self._path],
                env=dict(self._environment),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        finally:
            os.close(stdin)
        with self._process as process:
            if self._killed:
                self.kill()
            fault, texts = self._listen(process)
            if fault:
                self.kill()
            return Outcome(process.wait(), texts[0], texts[1], fault)

    def kill(self) -> None:
        """End the plugin and all of its session's processes."""
        self._killed = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _listen(self, process: subprocess.Popen[bytes]) -> tuple[str, list[bytes]]:
        """What it said, until both pipes are closed and it ended, or why it must be killed."""
        limit_s = time.monotonic() + self._timeout_s
        texts = [b"", b""]
        with selectors.DefaultSelector() as selector:
            for place, pipe in enumerate((process.stdout, process.stderr)):
                if pipe is not None:
                    selector.register(pipe, selectors.EVENT_READ, place)
            while selector.get_map():
                ready = selector.select(max(0.0, limit_s - time.monotonic()))
                if not ready:
                    return self._late(), texts
                for key, _events in ready:
                    texts[key.data] += _part(selector, key)
                if max(map(len, texts)) > self._max_bytes:
                    return f"it printed more than {self._max_bytes} bytes", [b"", b""]
        try:
            process.wait(max(0.0, limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return self._late(), texts
        return "", texts

    def _late(self) -> str:
        return f"no answer in {self._timeout_s:g} s"


def _part(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> bytes:
    part = os.read(key.fd, 65536)
    if not part:
        selector.unregister(key.fileobj)
    return part
