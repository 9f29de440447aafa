"""Applies a schedule's faults to a Field, reverts them, and reports both."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tests.chaos.field import Field
from tests.chaos.link import State
from tests.chaos.lives import Lives
from tests.chaos.schedule import Fault, Strike
from tests.chaos.simulated import Ballast
from tests.e2e import host
from tests.e2e.platform import NODE

from virtbus.bus.client.ports import Message

_WIRE = {
    Fault.CUT: State.CUT,
    Fault.HALF_OPEN: State.HALF_OPEN,
    Fault.SLOW: State.SLOW,
    Fault.GARBLE: State.GARBLED,
}


class Strikes:
    """The faults of one run; `say` gets a line for each."""

    def __init__(self, field: Field, lives: Lives, say: Callable[[str], None]) -> None:
        self._field = field
        self._lives = lives
        self._say = say
        self._heard: list[Message] = []
        self.count = 0

    async def strike(self, strike: Strike) -> None:
        """Apply one fault, from its start to its end."""
        self.count += 1
        begun = time.monotonic()
        what = strike.target
        match strike.fault:
            case Fault.KILL:
                self._signal(strike.target, signal.SIGKILL)
            case Fault.KILL_NODE:
                await asyncio.to_thread(self._field.kill_node)
                await asyncio.sleep(min(strike.lasts_s, 5))
                self._field.start_node()
            case Fault.HANG:
                pid = self._signal(strike.target, signal.SIGSTOP)
                await self._lasting(strike, lambda: _wake(pid))
            case Fault.FULL:
                ballast = Ballast(self._field.store)
                await asyncio.to_thread(ballast.fill)
                await self._lasting(strike, ballast.free)
            case Fault.KILL_GUEST | Fault.HANG_GUEST:
                what = await self._hurt_guest(strike)
            case Fault.REPLAY:
                what = await self._replay()
            case wire:
                await asyncio.to_thread(self._field.link.become, _WIRE[wire])
                await self._lasting(strike, lambda: self._field.link.become(State.WELL))
        took_s = time.monotonic() - begun
        self._say(f"{strike.fault} {what or '-'}, {took_s:.1f} s")

    async def _lasting(self, strike: Strike, undo: Callable[[], None]) -> None:
        try:
            await asyncio.sleep(strike.lasts_s)
        finally:
            await asyncio.shield(asyncio.to_thread(undo))

    def _signal(self, service: str, number: signal.Signals) -> int:
        pid = self._field.pids().get(service, 0)  # 0: it is dead already, and comes back
        return _signal(pid, number) if pid else 0

    async def _hurt_guest(self, strike: Strike) -> str:
        """Kill or stop the emulator of a running VM; do nothing if none runs."""
        running = [
            (life, pids)
            for life in self._lives.known.values()
            if not life.open and (pids := host.qemu_pids(life.uid))
        ]
        if not running:
            return "none runs"
        life, pids = running[int(strike.draw * len(running))]
        life.hurt = True
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
            bus.subscribe(f"virtbus.node.{NODE}.ready.>") as messages,
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
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return pid


def _wake(pid: int) -> None:
    _signal(pid, signal.SIGCONT)


@contextmanager
def awake(field: Field) -> Iterator[None]:
    """Undo every stop, cut and full disk after any outcome."""
    try:
        yield
    finally:
        field.link.become(State.WELL)
        Ballast(field.store).free()
        for pid in field.pids().values():
            _wake(pid)
