"""Measures each callback of a service's event loop by the CPU time of the loop's own thread.

Put on PYTHONPATH by the fuzzer's launcher; nothing of the product knows of it. It acts in processes
that run `python -m virtbus.<service>` only. The loop there is asyncio's own in place of uvloop's:
uvloop runs its callbacks in compiled code, where nobody can stand beside them.
"""

import asyncio
import json
import os
import sys
import threading
import time
import traceback
from contextlib import suppress

FOLDER = os.environ.get("VIRTBUS_FUZZ_PROBE", "")
TOLD_S = 0.1
"""Callbacks over this are written down; the verdict has a bound of its own."""
CAUGHT_S = 0.35
"""When a callback has used this much, its stack is taken once."""
LOOK_S = 0.05


def _service() -> str:
    argv = sys.orig_argv
    if "-m" in argv[:-1]:
        module = argv[argv.index("-m") + 1]
        if module.startswith("virtbus."):
            return module.removeprefix("virtbus.")
    return ""


class _Probe:
    def __init__(self, service: str) -> None:
        self._service = service
        self._path = f"{FOLDER}/{service}-{os.getpid()}.jsonl"
        self._begun_s: float | None = None
        self._stack: list[str] = []
        self._thread = threading.get_ident()
        self._plain = asyncio.Handle._run

    def install(self) -> None:
        probe, plain, clock = self, self._plain, time.thread_time

        def run(handle: asyncio.Handle) -> None:
            begun_s = probe._begun_s = clock()
            try:
                plain(handle)
            finally:
                probe._begun_s = None
                used_s = clock() - begun_s
                if used_s > TOLD_S:
                    probe._tell(handle, used_s)

        asyncio.Handle._run = run  # type: ignore[method-assign]
        threading.Thread(target=self._look, name="probe", daemon=True).start()

    def _look(self) -> None:
        clock = time.pthread_getcpuclockid(self._thread)
        caught: float | None = None
        while True:
            time.sleep(LOOK_S)
            begun_s = self._begun_s
            if begun_s is None or begun_s == caught:
                continue
            if time.clock_gettime(clock) - begun_s > CAUGHT_S:
                caught = begun_s
                frame = sys._current_frames().get(self._thread)
                self._stack = [
                    f"{entry.filename}:{entry.lineno} {entry.name}"
                    for entry in traceback.extract_stack(frame)[-12:]
                ]

    def _tell(self, handle: asyncio.Handle, used_s: float) -> None:
        stack, self._stack = self._stack, []
        callback = getattr(handle, "_callback", None)
        task = getattr(callback, "__self__", None)
        what = task if isinstance(task, asyncio.Task) else callback
        with suppress(Exception), open(self._path, "a", encoding="utf-8") as file:
            line = {
                "service": self._service,
                "at_s": time.time(),
                "used_s": round(used_s, 4),
                "callback": repr(what)[:400],
                "stack": stack,
            }
            file.write(json.dumps(line) + "\n")


_name = _service() if FOLDER else ""
if _name:
    import uvloop

    uvloop.run = asyncio.run  # type: ignore[assignment]
    _Probe(_name).install()
