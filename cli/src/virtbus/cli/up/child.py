"""Starts, restarts and stops one service as a child process."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Mapping
from contextlib import suppress

from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.cli.up.plan import STEADY_S, Place, environment, rest_s
from virtbus.cli.up.readiness import ReadySocket
from virtbus.cli.up.terminal import Terminal

STOP_S = 10.0
_LINE_BYTES = 256 * 1024


class Child:
    """A service's process. It is restarted until `stop`."""

    def __init__(
        self,
        place: Place,
        service: str,
        terminal: Terminal,
        inherited: Mapping[str, str],
        *,
        parent_fd: int,
    ) -> None:
        self.service = service
        self._place = place
        self._terminal = terminal
        self._inherited = inherited
        self._parent_fd = parent_fd
        self._process: Process | None = None
        self._stopping = asyncio.Event()
        self._started = asyncio.Event()
        """Cleared during the start of a process, so that `stop` waits and misses no process."""
        self._started.set()
        self.readiness = ReadySocket(f"{os.getpid()}-{service}")

    async def run(self) -> None:
        """Run the service, and restart it after each end. Return at the end that `stop` causes."""
        loop = asyncio.get_running_loop()
        deaths = 0
        with self.readiness.listening():
            while not self._stopping.is_set():
                started = loop.time()
                code = await self._live()
                if self._stopping.is_set():
                    return
                deaths = 1 if loop.time() - started > STEADY_S else deaths + 1
                pause_s = rest_s(deaths)
                self._terminal.say(
                    f"{self.service} ended ({_how(code)}); it is started again in {pause_s:g} s",
                    "WARNING",
                )
                await wait_for_event(self._stopping, pause_s)

    async def _live(self) -> int:
        self.readiness.forget()
        env = environment(
            self._place,
            self.service,
            parent_fd=self._parent_fd,
            notify=self.readiness.address,
            inherited=self._inherited,
        )
        self._started.clear()
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                f"virtbus.{self.service}",
                env=env,
                cwd="/",
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                pass_fds=(self._parent_fd,),
                # In its own session, the child gets no Ctrl-C. `up` stops the services in order.
                start_new_session=True,
                limit=_LINE_BYTES,
            )
        finally:
            self._started.set()
        await self._relay(process)
        return await process.wait()

    async def _relay(self, process: Process) -> None:
        assert process.stdout is not None  # noqa: S101  PIPE above
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:
                self._terminal.relay(self.service, "(a line over 256 KiB was dropped)")
                continue
            if not line:
                return
            self._terminal.relay(self.service, line.decode("utf-8", "replace").rstrip("\n"))

    async def stop(self) -> None:
        self._stopping.set()
        await self._started.wait()
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            self._terminal.say(f"{self.service} does not stop; it is killed", "WARNING")
            self._signal(signal.SIGKILL)
            await process.wait()

    def _signal(self, number: signal.Signals) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(number)


def _how(code: int) -> str:
    if code >= 0:
        return f"exit {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
