"""`make fuzz MINUTES=n SEED=s`: attacks with every credential and reports violations.

A seed always has the same schedule. FROM=turn begins later in it. SHOW=n prints the first n
turns and sends nothing. Exit code 0: no violation. Exit code 1: a violation, printed with its
lines, the last messages and the seed to repeat. The journal of all messages is in build-out/.
KEEP_ON=1 continues the attack after a service has ended.
"""

import os
import random
import sys
from itertools import islice
from pathlib import Path

from tests.fuzz.run import Run
from tests.fuzz.schedule import Schedule
from tests.fuzz.targets import targets


def show(seed: int, count: int) -> None:
    """Print the schedule, a line per message."""
    for shots in islice(Schedule(seed, targets()).turns(), count):
        for shot in shots:
            message = shot.message
            sys.stdout.write(
                f"{shot.number:6} {shot.user:12} {shot.subject[:90]} {len(message.body)} bytes"
                f" x{message.times}: {message.what[:100]!r}\n"
            )


def main() -> int:
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(10**6))
    minutes = float(os.environ.get("MINUTES") or 3)
    if os.environ.get("SHOW"):
        show(seed, int(os.environ["SHOW"]))
        return 0
    run = Run(
        seed,
        minutes * 60,
        first=int(os.environ.get("FROM") or 0),
        keep_on=os.environ.get("KEEP_ON", "") not in {"", "0"},
        journal=Path("build-out", f"fuzz-{seed}.jsonl"),
    )
    broken = run.run()
    for line in broken:
        sys.stdout.write(f"VIOLATION {line}\n")
    if broken:
        sys.stdout.write(f"repeat: make fuzz SEED={seed} MINUTES={minutes:g}\n")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
