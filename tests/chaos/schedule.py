"""Draws from a seed which fault hits which part, and for how long. It has no clock and no host."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    """Faults of a platform; a `KILL` has no end, the others are undone after a while."""

    KILL = "kill -9"
    KILL_NODE = "kill -9 of all on the node"
    HANG = "SIGSTOP"
    CUT = "link cut"
    HALF_OPEN = "link half-open"
    SLOW = "link slow"
    GARBLE = "link garbled"
    FULL = "bus disk full"
    KILL_GUEST = "kill -9 of an emulator"
    HANG_GUEST = "SIGSTOP of an emulator"
    REPLAY = "old messages again"


SERVICES = ("controller", "imaged", "netd", "nodeagent", "nats-server")
SIMULATED = ("controller", "simulator", "nats-server")
GUESTS = frozenset({Fault.KILL_GUEST, Fault.HANG_GUEST})
LONG_S = 35.0
"""Longer than every lease: heartbeat 15 s, leader lease 15 s, silence 25 s (F41)."""

_WEIGHTS: dict[Fault, int] = {
    Fault.KILL: 10,
    Fault.KILL_NODE: 2,
    Fault.HANG: 4,
    Fault.CUT: 3,
    Fault.HALF_OPEN: 2,
    Fault.SLOW: 2,
    Fault.GARBLE: 2,
    Fault.FULL: 1,
    Fault.KILL_GUEST: 3,
    Fault.HANG_GUEST: 1,
    Fault.REPLAY: 2,
}


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault. `pause_s` after the previous one, for `lasts_s`; `draw` in 0-1 selects a guest."""

    pause_s: float
    fault: Fault
    target: str
    lasts_s: float
    draw: float


def strikes(seed: int, *, simulate: bool) -> Iterator[Strike]:
    """The faults of a seed, without end; the same for the same arguments."""
    rng = random.Random(seed)
    faults = [fault for fault in _WEIGHTS if not (simulate and fault in GUESTS)]
    weights = [_WEIGHTS[fault] for fault in faults]
    while True:
        fault = rng.choices(faults, weights)[0]
        target = ""
        if fault in {Fault.KILL, Fault.HANG}:
            target = rng.choice(SIMULATED if simulate else SERVICES)
        long = rng.random() < 0.25
        yield Strike(
            pause_s=round(rng.uniform(0.5, 8.0), 1),
            fault=fault,
            target=target,
            lasts_s=LONG_S if long else round(rng.uniform(1.0, 12.0), 1),
            draw=rng.random(),
        )
