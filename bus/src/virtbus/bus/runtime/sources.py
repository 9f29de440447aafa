"""Sources of nondeterminism: wall time, randomness, fresh ids.

Every connection carries its sources, so every user of a bus has them; a simulation provides its
own. Timeouts use the loop's clock, `loop.time()`, which a simulation controls as well.
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
    """`REAL` everywhere but in a simulation."""

    time_ns: Callable[[], int] = time.time_ns
    """Unix nanoseconds: for display, and comparison with the stream's time; never for order."""
    uniform: Callable[[float, float], float] = random.uniform
    """A number in a range, for jitter; never a secret."""
    uuid7: Callable[[], str] = uuid7
    secret: Callable[[int], bytes] = secrets.token_bytes
    """The given number of unpredictable bytes."""

    def now(self) -> datetime:
        """Return the wall clock in UTC."""
        return datetime.fromtimestamp(self.time_ns() / 1e9, UTC)


REAL = Sources()
