"""Runs a CNI plugin in its own session, with limits for its time and its output.

The calling thread reads the output from plain pipes. asyncio's subprocess cannot release a pipe
that a child of the plugin keeps open after the plugin's end.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from virtbus.netd.edge.qemu_processes import processes

ENDED_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True)
class PluginOutcome:
    """The result of a run. `fault` names the limit that the plugin exceeded, or is empty."""

    code: int
    output: bytes
    errors: bytes
    fault: str = ""


class PluginProcess:
    """One run of a plugin. `run` blocks; another thread may call `kill` meanwhile."""

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

    def run(self) -> PluginOutcome:
        """Run the plugin until its end, with `given` as its stdin.

        Raises:
            OSError: the plugin cannot be started.
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
            return PluginOutcome(process.wait(), texts[0], texts[1], fault)

    def kill(self) -> None:
        self._killed = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _listen(self, process: subprocess.Popen[bytes]) -> tuple[str, list[bytes]]:
        """Read the output until the plugin and its children close the pipes, or up to a limit.

        Return the exceeded limit in words (empty if none), and stdout and stderr. Both outputs are
        empty if the plugin printed too much.
        """
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


def end_left(uids: Container[str], netns_dir: Path) -> list[int]:
    """Kill plugins that an earlier netd started for `uids`, and return their pids.

    Such a plugin may still attach a VM (ADD) while this netd detaches the VM (DEL). An ADD that
    ends after the DEL would leave links and addresses behind. Waits up to 5 s for the plugins' end.
    """
    left = [pid for pid, (uid, path) in _plugins() if uid in uids and path.parent == netns_dir]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    limit_s = time.monotonic() + ENDED_WITHIN_S
    while any(pid in left for pid, _ in _plugins()) and time.monotonic() < limit_s:
        time.sleep(0.01)
    return left


def _plugins() -> Iterator[tuple[int, tuple[str, Path]]]:
    for pid, strings in processes("environ"):
        words = dict(word.partition("=")[::2] for word in strings)
        if "CNI_CONTAINERID" in words:
            yield pid, (words["CNI_CONTAINERID"], Path(words.get("CNI_NETNS", "")))


def _part(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> bytes:
    part = os.read(key.fd, 65536)
    if not part:
        selector.unregister(key.fileobj)
    return part
