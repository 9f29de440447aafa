"""Applies a schedule's faults to a Field, reverts them, and reports both."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from tests.chaos.link import Link, State
from tests.chaos.lives import Lives
from tests.chaos.schedule import Fault, Strike
from tests.chaos.simulated import Ballast
from tests.e2e import host

from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.ports import Message

_WIRE = {
    Fault.CUT: State.CUT,
    Fault.HALF_OPEN: State.HALF_OPEN,
    Fault.SLOW: State.SLOW,
    Fault.GARBLE: State.GARBLED,
}


OF_BUS = frozenset({"controller", "nats-server"})
"""Services that are no node's."""


class Place(Protocol):
    """A node that strikes hit, with its link and the bus behind that."""

    name: str

    @property
    def link(self) -> Link: ...
    def pids(self) -> dict[str, int]: ...
    def kill_node(self) -> None: ...
    def start_node(self) -> None: ...


class Ground(Protocol):
    """A platform under chaos. `simulate`: without QEMU and without a network."""

    simulate: bool

    @property
    def struck(self) -> Sequence[Place]: ...
    @property
    def store(self) -> Path: ...
    def bus(self, user: str = "client") -> AbstractAsyncContextManager[NatsBus]: ...
    def wait_whole(self) -> None: ...
    def nothing_left(self) -> None: ...


class Strikes:
    """The faults of one run; `say` gets a line for each."""

    def __init__(self, field: Ground, lives: Lives, say: Callable[[str], None]) -> None:
        self._field = field
        self._lives = lives
        self._say = say
        self._heard: list[Message] = []
        self.count = 0

    async def strike(self, strike: Strike) -> None:
        """Apply one fault, from its start to its end."""
        self.count += 1
        begun = time.monotonic()
        there = self._field.struck
        place = there[int(strike.draw * len(there))]
        what = strike.target if strike.target in OF_BUS else f"{strike.target} {place.name}".strip()
        match strike.fault:
            case Fault.KILL:
                _signal(place.pids().get(strike.target, 0), signal.SIGKILL)
            case Fault.KILL_NODE:
                await asyncio.to_thread(place.kill_node)
                await asyncio.sleep(min(strike.lasts_s, 5))
                place.start_node()
            case Fault.HANG:
                pid = _signal(place.pids().get(strike.target, 0), signal.SIGSTOP)
                await self._lasting(strike, lambda: _wake(pid))
            case Fault.FULL:
                ballast = Ballast(self._field.store)
                await asyncio.to_thread(ballast.fill)
                await self._lasting(strike, ballast.free)
                what = ""
            case Fault.KILL_GUEST | Fault.HANG_GUEST:
                what = await self._hurt_guest(strike)
            case Fault.REPLAY:
                what = await self._replay()
            case wire:
                await asyncio.to_thread(place.link.become, _WIRE[wire])
                await self._lasting(strike, lambda: place.link.become(State.WELL))
        took_s = time.monotonic() - begun
        self._say(f"{strike.fault} {what or '-'}, {took_s:.1f} s")

    async def _lasting(self, strike: Strike, undo: Callable[[], None]) -> None:
        try:
            await asyncio.sleep(strike.lasts_s)
        finally:
            await asyncio.shield(asyncio.to_thread(undo))

    async def _hurt_guest(self, strike: Strike) -> str:
        """Kill or stop the emulator of a running VM; do nothing if none runs."""
        emulators = await asyncio.to_thread(host.emulators)
        running = [
            (life, emulators[life.uid])
            for life in self._lives.known.values()
            if not life.open and life.uid in emulators
        ]
        if not running:
            return "none runs"
        life, pids = running[int(strike.draw * len(running))]
        life.harm()
        if strike.fault is Fault.KILL_GUEST:
            _signal(pids[0], signal.SIGKILL)
        else:
            _signal(pids[0], signal.SIGSTOP)
            await self._lasting(strike, lambda: _wake(pids[0]))
        return life.name

    # --- old messages ---------------------------------------------------------------------
    async def hear(self) -> None:
        """Record the messages between the node's services, to repeat them later."""
        async with (
            self._field.bus("admin") as bus,
            bus.subscribe("virtbus.node.*.ready.>") as messages,
        ):
            async for message in messages:
                self._heard.append(message)

    async def _replay(self) -> str:
        """Repeat every recorded message twice, the oldest last."""
        async with self._field.bus("admin") as bus:
            for message in [*self._heard, *reversed(self._heard)]:
                with suppress(Exception):
                    await bus._link.send(message.subject, message.body, headers=message.headers)
        return f"{2 * len(self._heard)} messages"


def _signal(pid: int, number: signal.Signals) -> int:
    """Send a signal; 0 is a service that is dead already, and comes back."""
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return pid


def _wake(pid: int) -> None:
    _signal(pid, signal.SIGCONT)


@contextmanager
def awake(field: Ground) -> Iterator[None]:
    """Undo every stop, cut and full disk after any outcome."""
    try:
        yield
    finally:
        Ballast(field.store).free()
        for place in field.struck:
            place.link.become(State.WELL)
            for pid in place.pids().values():
                _wake(pid)
