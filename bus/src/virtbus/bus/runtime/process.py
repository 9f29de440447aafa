"""Runs a service's process: signals, readiness, the watchdog, the end of its parent."""

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import uvloop

from virtbus.bus.errors import DeniedError, UnavailableError
from virtbus.bus.runtime import logs
from virtbus.bus.runtime.settings import ServiceSettings
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.model import models

log = logging.getLogger(__name__)

STOP_AGAIN_S = 2.0
"""Time after which a service that is still stopping is cancelled again."""
ALIVE_INTERVAL_S = 3.0
TRIM_INTERVAL_S = 30.0
TRIM_AFTER_CPU_S = 0.3
"""Least CPU time of a service between two trims. After less CPU time, no pages are free."""
_READY: ContextVar[asyncio.Event] = ContextVar("ready")
"""Set once the service of this context has sent READY=1."""
YOUNG_OBJECTS = 20_000
"""Number of new objects that trigger a garbage collection.

With Python's default of 700, the objects of a burst of requests are scanned many times. The scans
took 6 % of a controller's CPU time. With YOUNG_OBJECTS they take 4 %.
"""

_MALLOC = {-1: 1024 * 1024, -3: 320 * 1024, -8: 2}
"""Arguments of mallopt(3): M_TRIM_THRESHOLD and M_MMAP_THRESHOLD in bytes, M_ARENA_MAX.

By default, glibc raises both thresholds up to 64 MiB after a large block was freed. The process
would then keep the memory of a burst of large requests. Memory of further arenas is never returned.

uvloop allocates 256 KiB for each read of a TLS connection, and then shrinks the block. With lower
thresholds, the kernel would map and clear this memory at each read, which takes 14 us.
"""


def _give_memory_back() -> None:
    """Make malloc return freed memory to the system soon (ADR 0028)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # None: not glibc
    for parameter, value in _MALLOC.items():
        if mallopt is not None:
            mallopt(parameter, value)


async def _trim_memory() -> None:
    """Return free pages between used blocks to the system. glibc does not do this by itself.

    A call takes 2 to 13 ms after a burst of requests.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # None: not glibc
    trimmed_s = 0.0
    while trim is not None:
        await asyncio.sleep(TRIM_INTERVAL_S)
        if time.process_time() - trimmed_s < TRIM_AFTER_CPU_S:
            continue
        gc.collect(1)  # skips the old objects, which may be many
        trim(0)
        trimmed_s = time.process_time()


def notify(state: str) -> None:
    """Send `state` to systemd (sd_notify(3)), if NOTIFY_SOCKET is set.

    READY=1 without a STATUS also creates the file whose path is in VIRTBUS_ALIVE_FILE.
    """
    alive = os.environ.get("VIRTBUS_ALIVE_FILE", "")
    if alive and state == "READY=1":
        Path(alive).touch()
    if state.startswith("READY=1") and (ready := _READY.get(None)):
        ready.set()
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)  # systemd must not block the service
        sock.connect("\0" + address[1:] if address.startswith("@") else address)
        sock.send(state.encode())


async def _watchdog() -> None:
    """Send WATCHDOG=1 from the event loop. If the loop stalls, systemd restarts the service."""
    interval_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 2_000_000
    while interval_s:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval_s)


async def _keep_fresh() -> None:
    """Touch VIRTBUS_ALIVE_FILE from the event loop once the service is ready.

    In containers, `virtbus.bus.client.health` checks the file's age instead of a watchdog.
    """
    path = os.environ.get("VIRTBUS_ALIVE_FILE", "")
    while path:
        with contextlib.suppress(FileNotFoundError):  # not ready yet
            os.utime(path)
        await asyncio.sleep(ALIVE_INTERVAL_S)


async def _build_models() -> None:
    """Build the remaining validators of messages, once the service is ready.

    So the service is ready sooner, and later requests do not wait for a validator.
    """
    await _READY.get().wait()
    for model in models():
        try:
            model.model_rebuild()
        except Exception:  # boundary: a faulty model affects only its own messages
            log.exception("no validator of %s", model.__name__, extra={"code": "internal"})
        await asyncio.sleep(0)


async def _parent_ended() -> None:
    """Return when `virtbus up` has ended and the kernel closes the pipe VIRTBUS_PARENT_FD.

    Without this variable, never return.
    """
    text = os.environ.get("VIRTBUS_PARENT_FD", "")
    if not text:
        await asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    descriptor = int(text)

    def readable() -> None:
        if not os.read(descriptor, 1) and not ended.done():
            ended.set_result(None)

    loop.add_reader(descriptor, readable)
    try:
        await ended
    finally:
        loop.remove_reader(descriptor)


@contextlib.contextmanager
def stop_signals() -> "Iterator[asyncio.Future[str]]":
    """Yield a future. Its result is the name of the first SIGINT or SIGTERM."""
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[str] = loop.create_future()

    def tell(name: str) -> None:
        if not signalled.done():
            signalled.set_result(name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, tell, number.name)
    try:
        yield signalled
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _until_stop() -> str:
    with stop_signals() as signalled:
        async with asyncio.TaskGroup() as group:
            parent = group.create_task(_parent_ended())
            ends: set[asyncio.Future[Any]] = {signalled, parent}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            parent.cancel()
        return signalled.result() if signalled.done() else "the parent's end"


async def supervise(body: Callable[[], Awaitable[None]]) -> None:
    """Run `body`. On a signal or the parent's end, cancel `body` and wait until it ends."""
    _READY.set(asyncio.Event())
    async with asyncio.TaskGroup() as group:
        work = group.create_task(_body(body))
        dog = group.create_task(_watchdog())
        fresh = group.create_task(_keep_fresh())
        build = group.create_task(_build_models())
        trim = group.create_task(_trim_memory())
        stop = group.create_task(_until_stop())
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            log.info("stopping: %s", stop.result(), extra={"code": "stopping"})
        notify("STOPPING=1")
        for task in (dog, fresh, build, trim, stop):
            task.cancel()
        while not work.done():  # Python 3.11 loses a cancel at the moment when a wait_for finishes
            work.cancel()
            await asyncio.wait({work}, timeout=STOP_AGAIN_S)


async def _body(body: Callable[[], Awaitable[None]]) -> None:
    await body()


def run(settings: ServiceSettings, body: Callable[[], Awaitable[None]]) -> int:
    """Run a service process; return its exit code (0 stopped, 1 failed).

    An expected failure, for example an unreachable bus or a refused login, is logged as one line.
    The traceback follows at DEBUG.
    """
    logs.setup(settings.service, settings.node, level=settings.log_level, style=settings.log_format)
    os.umask(0o077)
    if alive := os.environ.get("VIRTBUS_ALIVE_FILE", ""):
        Path(alive).unlink(missing_ok=True)  # the file of an earlier process
    _give_memory_back()
    # The 100,000 objects of imported modules are permanent. Without `freeze`, each full collection
    # would scan them for 30 ms. No collection precedes `freeze`, because it would free only 1 %.
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    try:
        uvloop.run(supervise(body))
    except Exception as error:
        ends = tuple(_leaves(error))
        if all(map(_foreseen, ends)):
            for one in ends:
                log.error("%s cannot run: %s", settings.service, one, extra={"code": "cannot_run"})
            log.debug("traceback", exc_info=error)
        else:
            log.exception("%s failed", settings.service, extra={"code": "service_failed"})
        return 1
    return 0


def _foreseen(error: Exception) -> bool:
    if isinstance(error, VirtbusError):
        return error.expected
    return isinstance(error, UnavailableError | DeniedError)


def _leaves(error: Exception) -> Iterator[Exception]:
    if isinstance(error, ExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
    else:
        yield error
