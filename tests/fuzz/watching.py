"""Checks during an attack: services, callbacks, memory, and honest tenants."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.ground import EVIL, Ground, pss_bytes

MIB = 1024**2
CALLBACK_S = 0.5
"""Maximum CPU time of one callback on its loop's thread."""
GROWTH_BYTES = 20 * MIB
SETTLED_S = 60.0
"""Memory must recover within this time after the attack."""
TRIMMED_S = 10.0
RATIO = 3.0
LOOK_S = 0.5
TAKEN_OVER = "is run by an agent of"
"""Log line of an agent that ends because another instance has its node's key (ADR 0031).

The node's own credentials may write that key, so it is no violation on the hostile node.
"""
FEWEST = 20
"""With fewer creates a p99 has no meaning."""

Json = dict[str, Any]


def p99(values: Sequence[float]) -> float:
    """By nearest rank; of fewer than a hundred it is the largest."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


@dataclass
class Watching:
    """`broken` has a line for each violation; `held` one for each passed check."""

    ground: Ground
    stop: asyncio.Event
    last: Callable[[], Iterable[str]]
    """The last messages, printed with each violation."""
    keep_on: bool = False
    """True: an attack continues after a service has ended."""
    broken: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    slow: list[Json] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)
    _pids: dict[str, int] = field(default_factory=dict)
    _before: dict[str, int] = field(default_factory=dict)
    _begun_s: float = 0.0

    def begin(self) -> None:
        """Record the living services and their memory."""
        self._begun_s = time.monotonic()
        self._pids = self.ground.services()
        self._before = self.memory()

    def memory(self) -> dict[str, int]:
        return {name: pss_bytes(pid) for name, pid in self.ground.services().items()}

    async def watch(self) -> None:
        """Check until cancelled; the first service that ends stops the attack."""
        while True:
            self._look()
            await asyncio.sleep(LOOK_S)

    def _look(self) -> None:
        now = self.ground.services()
        for name, pid in list(self._pids.items()):
            if now.get(name) != pid:
                self._died(name, pid, now.get(name))
        if self.keep_on:
            self._pids = {**now, **self._pids}
        for name, pid in now.items():
            self.peaks[name] = max(self.peaks.get(name, 0), pss_bytes(pid))
        for line in self.ground.slow_callbacks()[len(self.slow) :]:
            self.slow.append(line)
            if line["used_s"] > CALLBACK_S:
                self._overran(line)

    def _at(self) -> str:
        return f"after {time.monotonic() - self._begun_s:.0f} s of attack"

    def _died(self, name: str, pid: int, successor: int | None) -> None:
        del self._pids[name]
        log = self.ground.log.read_text(errors="replace").splitlines()
        service = name.partition("-")[0]
        of_it = [line for line in log if f" {service} " in line][-12:]
        sent = list(self.last())
        if name.endswith(f"-{EVIL}") and any(TAKEN_OVER in line for line in of_it):
            self.held.append(f"takeover: the credentials of {EVIL} took its node from {name}")
            return
        what = f"alive: {name} (pid {pid}) ended {self._at()}; now {successor}"
        self.broken.append("\n  ".join([what, *of_it, "sent last:", *sent]))
        if not self.keep_on:
            self.stop.set()
        elif successor is not None:
            self._pids[name] = successor

    def _overran(self, line: Json) -> None:
        stack = line["stack"][-6:]
        used = f"{line['used_s']:g} s {self._at()}"
        what = f"callback: {line['service']} used {used} in {line['callback']}"
        sent = list(self.last())[-8:]
        self.broken.append("\n  ".join([what, *stack, "sent last:", *sent]))

    # --- at the end -----------------------------------------------------------------------
    async def judge(self) -> None:
        """Check that the living services have no more memory than before."""
        self._look()
        if not any(line.startswith("alive") for line in self.broken):
            self.held.append(f"alive: {len(self._pids)} services, the same processes")
        worst = max((line["used_s"] for line in self.slow), default=0.0)
        if worst <= CALLBACK_S:
            self.held.append(f"callback: none over {CALLBACK_S:g} s of CPU; most {worst:.2f} s")
        limit_s = time.monotonic() + SETTLED_S
        grown = self._grown()
        while grown and time.monotonic() < limit_s:
            await asyncio.sleep(1)
            grown = self._grown()
        told = ", ".join(f"{name} {size / MIB:+.0f}" for name, size in self._growth().items())
        used = await self._trimmed(grown)
        for name, size in grown.items():
            grew = f"{size / MIB:.0f} MiB, of which {used[name] / MIB:.0f} are in use"
            self.broken.append(f"memory: {name} grew by {grew} (all, MiB: {told})")
        if not grown:
            self.held.append(f"memory: back to within 20 MiB (MiB: {told})")

    async def _trimmed(self, grown: dict[str, int]) -> dict[str, int]:
        """Return the remaining growth after free memory is returned to the system."""
        files = [self.ground.probes / f"trim-{self._pids[name]}" for name in grown]
        for file in files:
            file.touch()
        limit_s = time.monotonic() + TRIMMED_S
        while any(file.exists() for file in files) and time.monotonic() < limit_s:
            await asyncio.sleep(0.1)
        return self._growth()

    def _growth(self) -> dict[str, int]:
        now = self.memory()
        kept = {name for name, pid in self._pids.items() if now.get(name) and pid}
        return {name: now[name] - self._before[name] for name in sorted(kept)}

    def _grown(self) -> dict[str, int]:
        return {name: size for name, size in self._growth().items() if size > GROWTH_BYTES}


class Tenants:
    """The neighbours' process and its output."""

    def __init__(self, ground: Ground) -> None:
        self._file = ground.seen
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.neighbours", str(ground.run_dir), str(self._file)],
            cwd=Path(__file__).parents[2],
        )

    def lines(self, since_s: float = 0.0, until_s: float = math.inf) -> list[Json]:
        """Return their observations in a period."""
        if not self._file.exists():
            return []
        texts = self._file.read_text(encoding="utf-8").splitlines()
        found = [json.loads(text) for text in texts if text.endswith("}")]
        return [line for line in found if since_s <= line["at_s"] < until_s]

    def end(self) -> None:
        """Let them delete their VMs and exit."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(90)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def judge(
        self, begun_s: float, attacked_s: float, over_s: float
    ) -> tuple[list[str], list[str]]:
        """Compare a quiet phase with an attacked one: violations and passed checks."""
        before, during = self.lines(begun_s, attacked_s), self.lines(attacked_s, over_s)
        wrong = Counter(
            f"{line.get('what') or 'a VM'}: {line['why']}"
            for line in during
            if line["kind"] in {"failed", "blind"}
        )
        broken = [f"neighbours: {count} times {what}" for what, count in wrong.most_common()]
        held = []
        if not broken:
            looks = sum(line["kind"] == "look" for line in during)
            held.append(f"neighbours: every VM ran and went; {looks} looks at lists and watches")
        quiet, loud = (
            [line["took_s"] for line in lines if line["kind"] == "create"]
            for lines in (before, during)
        )
        if min(len(quiet), len(loud)) < FEWEST:
            broken.append(f"creates: too few to judge: {len(quiet)} before, {len(loud)} during")
            return broken, held
        told = (
            f"creates: p99 {p99(quiet):.3f} s of {len(quiet)} before, {p99(loud):.3f} s of "
            f"{len(loud)} under attack"
        )
        (broken if p99(loud) > RATIO * p99(quiet) else held).append(told)
        return broken, held
