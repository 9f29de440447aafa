"""`python -m tests.load.storm`: real guests started all at once, against plain libvirt's starts.

The same domains at the same concurrency in the same run, raw before and after; as many guests as
placement gives this machine (vCPUs eight times its CPUs), each with the least memory.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from tests.bench.measures import raw_of
from tests.bench.rawvirt import RawVirt
from tests.bench.stage import Stage, stage
from tests.load.meters import line

OVERCOMMIT = 8
STARTS_AT_ONCE = 2 * (os.cpu_count() or 1)
"""The agent's own: starts are bound by QEMU's CPU."""
BOUND = 0.9
"""Of raw libvirt's rate."""


def raw_storm(raw: RawVirt, guests: int) -> float:
    """Guests per second of plain define and create; then all are ended."""
    xmls = [raw.prepare() for _ in range(guests)]
    begun = time.perf_counter()
    with ThreadPoolExecutor(STARTS_AT_ONCE) as pool:
        domains = [domain for _, domain in pool.map(raw.start, xmls)]
    took = time.perf_counter() - begun
    with ThreadPoolExecutor(STARTS_AT_ONCE) as pool:
        list(pool.map(raw.destroy, domains))
    return guests / took


async def our_storm(here: Stage, guests: int) -> float:
    """Guests per second, from the first request until the client is told that the last runs."""
    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(guests):
            group.create_task(here.create())
    took = time.perf_counter() - begun
    await here.clear()
    return guests / took


async def storm(guests: int, rounds: int) -> tuple[list[float], list[float]]:
    """Rates of ours and of raw, by round."""
    ours, floor = [], []
    async with stage() as here:
        raw = await raw_of(here)
        for _ in range(rounds):
            before = await asyncio.to_thread(raw_storm, raw, guests)
            ours.append(await our_storm(here, guests))
            after = await asyncio.to_thread(raw_storm, raw, guests)
            floor.append((before + after) / 2)
    return ours, floor


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.load.storm", description=__doc__)
    parser.add_argument("--guests", type=int, default=OVERCOMMIT * (os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    ours, floor = asyncio.run(storm(options.guests, options.rounds))
    share = statistics.median(a / b for a, b in zip(ours, floor, strict=True))
    sys.stdout.write(
        line(
            "storm",
            guests=options.guests,
            at_once=STARTS_AT_ONCE,
            ours_per_s=[round(rate, 2) for rate in ours],
            raw_per_s=[round(rate, 2) for rate in floor],
            share=round(share, 3),
        )
        + "\n"
    )
    return 0 if share >= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
