"""Starts, kills and restarts the product's processes of a run, and waits for their readiness."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

READY_S = 120.0
DIES_WITH_US = ("setpriv", "--pdeathsig", "TERM")
"""The kernel ends them with the run, after any end of it."""
YIELDS = ("nice", "-n", "10")
"""For simulated nodes: they would have CPUs of their own, so the control plane has priority
here.
"""
PROFILE_ENV = "VIRTBUS_LOAD_PROFILE"
"""A folder: each service then runs under cProfile and writes `<name>.prof` there."""


class Service:
    """One process of `python -m <module>`; it reports readiness as to systemd."""

    def __init__(
        self, name: str, module: str, folder: Path, *arguments: str, yields: bool = False
    ) -> None:
        self.name = name
        profile = os.environ.get(PROFILE_ENV)
        under = ["-m", "cProfile", "-o", f"{profile}/{name}.prof"] if profile else []
        first = (*DIES_WITH_US, *YIELDS) if yields else DIES_WITH_US
        self._argv = [*first, sys.executable, *under, "-m", module, *arguments]
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._notify = folder / f"{name}.notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self._notify))
        self._socket.setblocking(False)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> Path:
        return self._folder / f"{self.name}.log"

    def start(self) -> None:
        environment = {
            **os.environ,
            "VIRTBUS_RUN_DIR": str(self._folder / "run"),
            "VIRTBUS_STATE_DIR": str(self._folder / "state"),
            "VIRTBUS_LOG_LEVEL": "WARNING",
            "VIRTBUS_LOG_FORMAT": "json",
            "NOTIFY_SOCKET": str(self._notify),
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._argv, env=environment, stdout=log, stderr=log)

    async def ready(self) -> None:
        """Wait for READY=1."""
        assert self._process is not None
        give_up_s, told = time.monotonic() + READY_S, b""
        while b"READY=1" not in told:
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                raise SystemExit("\n".join([f"{self.name} is not ready:", *self.complaints()]))
            await asyncio.sleep(0.01)
            with suppress(BlockingIOError):
                told = self._socket.recv(4096)

    async def killed_and_ready(self) -> float:
        """Kill -9 and restart; return the seconds from the new start until it is ready."""
        os.kill(self.pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        with suppress(BlockingIOError):
            while self._socket.recv(4096):
                pass
        begun = time.monotonic()
        self.start()
        await self.ready()
        return time.monotonic() - begun

    def stop(self) -> None:
        process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._socket.close()

    def complaints(self) -> list[str]:
        """Return log lines at WARNING and above: a good run has none."""
        return self.log.read_text(errors="replace").splitlines() if self.log.exists() else []


@contextmanager
def running(*services: Service) -> Iterator[None]:
    """Run all of them while the context is open."""
    try:
        for service in services:
            service.start()
        yield
    finally:
        for service in reversed(services):
            service.stop()
