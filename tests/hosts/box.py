"""Boxes: simulated hosts on this machine, with their own processes, mounts, links and cgroups."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
BRIDGE = "vb-switch"
NETWORK = "10.200.0"
GATEWAY = f"{NETWORK}.254"
BASE_DIR = Path(os.environ.get("VIRTBUS_HOSTS_DIR", "/dev/shm"))
RESTART_S = 1.0


class Kept:
    """A command in a box that is restarted when it ends, as systemd would."""

    def __init__(
        self, box: "Box", name: str, argv: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        self._box = box
        self.log = box.base / f"{name}.log"
        self._argv = [str(word) for word in argv]
        self._environ = dict(environ)
        self._over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name=f"{box.name}/{name}")
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            with self.log.open("ab") as log:
                self._process = self._box.popen(*self._argv, environ=self._environ, log=log)
                if self._over.is_set():
                    self._process.kill()
                self._process.wait()
            self._over.wait(RESTART_S)

    def forget(self) -> None:
        """Restart it no more; a running process continues."""
        self._over.set()

    def join(self) -> None:
        """Return when it has ended, after `forget`."""
        self._thread.join(30)


class Box:
    """One box. `base` is its folder here; `path` returns the box's path of a file."""

    def __init__(self, boxes: "Boxes", name: str, number: int) -> None:
        self._boxes = boxes
        self.name = name
        self.address = f"{NETWORK}.{number}"
        self.base = boxes.base / name
        self.pid = 0
        self._kept: dict[str, Kept] = {}

    # --- power ----------------------------------------------------------------------------
    def on(self) -> None:
        """Power on: an empty /run, and the disk as it was left."""
        self.pid = int(self._boxes.tell("on", self.name, f"{self.address}/24"))

    def off(self) -> None:
        """Cut the power: every process is killed at once; the disk stays."""
        for kept in self._kept.values():
            kept.forget()
        self._boxes.tell("off", self.name)
        for kept in self._kept.values():
            kept.join()
        self._kept.clear()
        self.pid = 0

    # --- inside ---------------------------------------------------------------------------
    def path(self, inside: str | Path) -> Path:
        """Return the path of the box's file on this machine."""
        return Path(f"/proc/{self.pid}/root/{str(inside).lstrip('/')}")

    def _enter(self, argv: Sequence[str]) -> list[str]:
        groups = f"/sys/fs/cgroup/*/virtbus-hosts-{self._boxes.pid}/{self.name}/cgroup.procs"
        join = f'for group in {groups}; do echo $$ >"$group"; done; exec "$@"'
        inside = ["nsenter", "-t", str(self.pid), *["-m", "-n", "-p", "-u", "-C"], "--", *argv]
        return ["bash", "-c", join, "enter", *inside]

    def popen(
        self, *argv: str, environ: Mapping[str, str] | None = None, log: IO[bytes] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a command in the box; its own pid is another one (see `processes`)."""
        return subprocess.Popen(
            self._enter(argv),
            env={**os.environ, **(environ or {})},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log or subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, *argv: str, timeout_s: float = 60, check: bool = True) -> str:
        """Return the output of a command in the box."""
        done = subprocess.run(
            self._enter(argv), capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if check and done.returncode != 0:
            msg = (
                f"{self.name}: {' '.join(argv)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
            )
            raise AssertionError(msg)
        return done.stdout

    def keep(self, name: str, *argv: str, environ: Mapping[str, str] | None = None) -> Kept:
        """Run a command and restart it whenever it ends, until the power is cut."""
        self._kept[name] = Kept(self, name, argv, environ or {})
        return self._kept[name]

    def unkeep(self, name: str) -> None:
        """Stop restarting a kept command."""
        self._kept.pop(name).forget()

    def processes(self) -> dict[int, list[str]]:
        """Return the command lines of the box's processes, by their pid on this machine."""
        with suppress(OSError):
            here = os.readlink(f"/proc/{self.pid}/ns/pid")
            return {pid: argv for pid, argv in _all() if _namespace(pid) == here}
        return {}

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal; a missing process is no error."""
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    # --- link -----------------------------------------------------------------------------
    def cut(self) -> None:
        """Pull the cable to the switch."""
        subprocess.run(["ip", "link", "set", f"vb-{self.name}", "down"], check=True)

    def heal(self) -> None:
        """Plug it in again."""
        subprocess.run(["ip", "link", "set", f"vb-{self.name}", "up"], check=True)


def _all() -> Iterator[tuple[int, list[str]]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                argv = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
                if argv:
                    yield int(folder.name), argv


def _namespace(pid: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


class Boxes:
    """The client of the holder. The holder ends with this process in any case."""

    def __init__(self, seed: Path) -> None:
        self.base = BASE_DIR / f"virtbus-hosts-{os.getpid()}-{time.monotonic_ns() % 10**6}"
        self.base.mkdir(mode=0o755)
        self._lock = threading.Lock()
        argv = [sys.executable, "-m", "tests.hosts.holder", str(self.base), str(seed), BRIDGE]
        self._holder = subprocess.Popen(
            [*argv, f"{GATEWAY}/24"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._holder.pid

    def tell(self, *words: str) -> str:
        """Send an order to the holder; return the last word of its answer."""
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        with self._lock:
            self._holder.stdin.write(" ".join(words) + "\n")
            self._holder.stdin.flush()
            answer = self._holder.stdout.readline()
        assert answer, f"the holder ended at: {' '.join(words)}"
        return answer.split()[-1]

    def end(self) -> None:
        """Remove all boxes and all their traces before returning."""
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.wait(60)
        self._holder.stdout.close()


@contextmanager
def boxes(seed: Path) -> Iterator[Boxes]:
    """A switch without boxes; all powered-on boxes end with the context."""
    held = Boxes(seed)
    try:
        yield held
    finally:
        held.end()
