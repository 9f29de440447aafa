"""What differs from run to run: wall time, randomness, fresh ids (design §6 "Ports").

Every connection carries its sources, so whoever has a bus has them; a simulation gives its own.
Waiting and durations use the loop's clock, `loop.time()`, which a simulation owns too.
"""

import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from virtbus.bus.ids import uuid7


@dataclass(frozen=True, slots=True)
class Sources:
    """`REAL` everywhere but in a simulation."""

    time_ns: Callable[[], int] = time.time_ns
    """Unix nanoseconds: stamps for people, and comparison with the stream's time; never order."""
    uniform: Callable[[float, float], float] = random.uniform
    """A number between two: jitter, never a secret."""
    uuid7: Callable[[], str] = uuid7
    secret: Callable[[int], bytes] = secrets.token_bytes
    """So many bytes that nobody can guess."""

    def now(self) -> datetime:
        """The wall clock, in UTC."""
        return datetime.fromtimestamp(self.time_ns() / 1e9, UTC)


REAL = Sources()
