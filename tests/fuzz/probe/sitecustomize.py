"""Measures each callback of a service's event loop by the CPU time of the loop's own thread.

The fuzzer's launcher puts it on PYTHONPATH; the product does not know it. It acts in processes
that run `python -m virtbus.<service>`, and in the bridge's port. It wraps the scheduling methods
of their uvloop, so that each step of a task, each timer and each reader is measured.
"""

import asyncio
import ctypes
import gc
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

FOLDER = os.environ.get("VIRTBUS_FUZZ_PROBE", "")
BRIDGE = "tests.fuzz.webhooks"
"""The module that runs the bridge's handlers."""
TOLD_S = 0.1
"""Callbacks over this are recorded; the verdict has a bound of its own."""
CAUGHT_S = 0.35
"""After this much CPU time of a callback, its stack is recorded once."""
STUCK_S = 1.5
"""A callback with this much CPU time is recorded before its end, which may never come."""
LOOK_S = 0.05
FRAMES = 12


def _service() -> str:
    argv = sys.orig_argv
    if "-m" in argv[:-1]:
        module = argv[argv.index("-m") + 1]
        if module.startswith("virtbus.") or module == BRIDGE:
            return module.rpartition(".")[2]
    return ""


class _Probe:
    def __init__(self, service: str) -> None:
        self._service = service
        self._path = f"{FOLDER}/{service}-{os.getpid()}.jsonl"
        self._begun_s: float | None = None
        self._stack: list[str] = []
        self._thread = threading.get_ident()
        threading.Thread(target=self._look, name="probe", daemon=True).start()

    def measured(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.thread_time

        def call(*args: Any) -> Any:
            begun_s = self._begun_s = clock()
            try:
                return callback(*args)
            finally:
                self._begun_s = None
                used_s = clock() - begun_s
                if used_s > TOLD_S:
                    self._tell(callback, used_s)

        return call

    def _look(self) -> None:
        clock = time.pthread_getcpuclockid(self._thread)
        caught: float | None = None
        told: float | None = None
        while True:
            time.sleep(LOOK_S)
            self._trim()
            begun_s = self._begun_s
            if begun_s is None:
                continue
            used_s = time.clock_gettime(clock) - begun_s
            if used_s > CAUGHT_S and begun_s != caught:
                caught = begun_s
                frame = sys._current_frames().get(self._thread)
                self._stack = [
                    f"{entry.filename}:{entry.lineno} {entry.name}"
                    for entry in traceback.extract_stack(frame)[-FRAMES:]
                ]
            if used_s > STUCK_S and begun_s != told:
                told = begun_s
                self._write("it still runs", used_s, self._stack)

    @staticmethod
    def _trim() -> None:
        """Return free memory to the system on request: the remaining memory is in use."""
        path = f"{FOLDER}/trim-{os.getpid()}"
        if os.path.exists(path):
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            os.unlink(path)

    def _tell(self, callback: Callable[..., Any], used_s: float) -> None:
        stack, self._stack = self._stack, []
        task = getattr(callback, "__self__", None)
        what = task if isinstance(task, asyncio.Task) else callback
        self._write(repr(what), used_s, stack)

    def _write(self, what: str, used_s: float, stack: list[str]) -> None:
        with suppress(Exception), open(self._path, "a", encoding="utf-8") as file:
            line = {
                "service": self._service,
                "at_s": time.time(),
                "used_s": round(used_s, 4),
                "callback": what[:400],
                "stack": stack,
            }
            file.write(json.dumps(line) + "\n")


SCHEDULES = {
    "call_soon": 0,
    "call_soon_threadsafe": 0,
    "call_later": 1,
    "call_at": 1,
    "add_reader": 1,
    "add_writer": 1,
}
"""Methods of a loop that take a callback, and its position among their arguments."""


def _install(service: str) -> None:
    import uvloop

    probe = _Probe(service)

    def measuring(name: str, place: int) -> Callable[..., Any]:
        plain = getattr(uvloop.Loop, name)

        def schedule(loop: Any, *args: Any, **more: Any) -> Any:
            callback = probe.measured(args[place])
            return plain(loop, *args[:place], callback, *args[place + 1 :], **more)

        return schedule

    methods = {name: measuring(name, place) for name, place in SCHEDULES.items()}
    loop_factory: Any = type("Loop", (uvloop.Loop,), methods)

    def run(main: Any, **_: Any) -> Any:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(main)

    uvloop.run = run


_name = _service() if FOLDER else ""
if _name:
    _install(_name)
