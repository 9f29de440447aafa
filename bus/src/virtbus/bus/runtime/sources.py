"""Provides the sources of nondeterminism: wall time, random numbers, new ids.

All users of a connection to the bus share its sources. The simulation passes its own sources.
Timeouts use the clock of the event loop, which the simulation controls, too.
"""

import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from virtbus.bus.runtime.ids import uuid7


@dataclass(frozen=True, slots=True)
class Sources:
    """A set of sources. The simulation has its own; all other processes use `REAL`."""

    time_ns: Callable[[], int] = time.time_ns
    """Unix time in nanoseconds, for display and comparison with stream times, not for ordering."""
    uniform: Callable[[float, float], float] = random.uniform
    """A random number in a range, for jitter. Secrets need `secret`."""
    uuid7: Callable[[], str] = uuid7
    secret: Callable[[int], bytes] = secrets.token_bytes
    """The given number of cryptographically random bytes."""

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.time_ns() / 1e9, UTC)


REAL = Sources()
