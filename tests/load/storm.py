"""`python -m tests.load.storm`: guests of one host, all started at once, on real QEMU.

It compares the product's starts with plain libvirt's starts of the same domains, in turns, with
the agent's number of starts in flight. Both sides have QEMU, disks, seed and one virtio NIC on a
tap. The product's NIC is made by netd, with its DHCP lease and filters, because every VM has
that; plain libvirt's is made by libvirt.
"""

import argparse
import asyncio
import os
import statistics
import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.measures import raw_of
from tests.bench.stage import Stage, stage
from tests.load.__main__ import say
from tests.load.crowd import STARTS_AT_ONCE, Crowd, plain_crowd
from tests.load.meters import cpu_s, line

BOUND = 0.9
MEMORY_MIB, QEMU_MIB = 64, 48
OF_FREE_MEMORY = 0.75
GUESTS_PER_CPU = 32
"""More guests would only take longer: a start is CPU, and the rate is the same."""
TINY = Path("/var/lib/virtbus/images/src/tiny.qcow2")


def guests_that_fit() -> int:
    """Return the number of guests for this host's memory and CPUs."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free_kib = next(int(text.split()[1]) for text in lines if text.startswith("MemAvailable:"))
    by_memory = int(free_kib / 1024 * OF_FREE_MEMORY) // (MEMORY_MIB + QEMU_MIB)
    return max(1, min(by_memory, GUESTS_PER_CPU * (os.cpu_count() or 1)))


@dataclass
class Rounds:
    """Seconds of each round."""

    guests: int
    plain: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    creates: list[float] = field(default_factory=list)
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)
    """CPU of our processes per start."""

    def shares(self, took: list[float]) -> dict[str, Any]:
        """The product's rate over libvirt's, per round, as a round sees one machine state."""
        shares = sorted(round(a / b, 3) for a, b in zip(self.plain, took, strict=True))
        return {"share": round(statistics.median(shares), 3), "shares": shares}

    def figures(self) -> dict[str, dict[str, Any]]:
        def of(took: list[float]) -> dict[str, Any]:
            rate = self.guests / statistics.median(took)
            return {"per_s": round(rate, 2), "seconds": [round(one, 2) for one in took]}

        cpu_ms = {name: round(statistics.median(all_), 1) for name, all_ in self.cpu_ms.items()}
        return {
            "plain starts": of(self.plain),
            "starts": of(self.starts) | self.shares(self.starts) | {"cpu_ms_per_vm": cpu_ms},
            "creates": of(self.creates) | self.shares(self.creates),
        }


async def storm(here: Stage, guests: int, rounds: int) -> Rounds:
    """Creates, plain starts and starts, in turns; each begins on a host without running guests."""
    taken = Rounds(guests)
    raw = await raw_of(here)
    with plain_crowd(raw, guests) as plain:

        async def plain_starts() -> None:
            taken.plain.append(await plain.start())
            await plain.stop()

        for number in range(rounds):
            crowd = Crowd(here, guests, MEMORY_MIB)
            taken.creates.append(await crowd.create())
            await crowd.stop()
            if number % 2:
                await _starts(here, crowd, taken)
                await plain_starts()
            else:
                await plain_starts()
                await _starts(here, crowd, taken)
            await crowd.delete()
            say(
                f"round {number + 1}: creates {taken.creates[-1]:.1f} s, plain "
                f"{taken.plain[-1]:.1f} s, starts {taken.starts[-1]:.1f} s"
            )
    return taken


async def _starts(here: Stage, crowd: Crowd, taken: Rounds) -> None:
    pids = here.pids()
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    taken.starts.append(await crowd.start())
    for name, pid in pids.items():
        spent_ms = (cpu_s(pid) - before[name]) * 1000 / taken.guests
        taken.cpu_ms.setdefault(name, []).append(spent_ms)
    await crowd.stop()


def table(guests: int, guest: str, figures: dict[str, dict[str, Any]]) -> str:
    """Markdown, as `docs/explanation/performance.md` has it."""
    starts, creates = figures["starts"], figures["creates"]
    cpu = ", ".join(f"{name} {value:g}" for name, value in starts["cpu_ms_per_vm"].items())
    rows = [
        (f"{guests} guests of {MEMORY_MIB} MiB ({guest}), {STARTS_AT_ONCE} starts at once", ""),
        ("---", "---"),
        ("plain libvirt starts", f"{figures['plain starts']['per_s']} /s"),
        ("starts, all told Running", f"{starts['per_s']} /s"),
        (f"starts / plain (bound {BOUND})", f"{starts['share']} of {starts['shares']}"),
        ("creates, all told Running", f"{creates['per_s']} /s"),
        ("creates / plain starts", f"{creates['share']} of {creates['shares']}"),
        ("CPU ms per start", cpu),
        ("starts of plain", "ok" if starts["share"] >= BOUND else "MISSED"),
    ]
    return "\n".join(f"| {name} | {value} |" for name, value in rows)


def platform(
    guests: int, image: Path | None = None, **environment: str
) -> AbstractAsyncContextManager[Stage]:
    """A controller that places by memory alone, which limits a storm."""
    vcpus_per_cpu = max(8, guests + 1)
    return stage(image, VIRTBUS_VCPUS_PER_CPU=str(vcpus_per_cpu), **environment)


async def run(guests: int, rounds: int, image: Path | None) -> Rounds:
    async with platform(guests, image) as here:
        return await storm(here, guests, rounds)


def main() -> int:
    """Return 0 if the bound holds, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="tests.load.storm", description=__doc__)
    parser.add_argument("--guests", type=int, default=0, help="0: as many as this host holds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--guest",
        choices=("halt", "tiny"),
        default="halt",
        help="halt: once started it costs no CPU; tiny: Linux, whose boots the starts compete with",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    guests = options.guests or guests_that_fit()
    say(f"{guests} guests, {STARTS_AT_ONCE} starts at once, {options.rounds} rounds")
    image = TINY if options.guest == "tiny" else None
    taken = asyncio.run(run(guests, options.rounds, image))
    figures = taken.figures()
    lines = [line(name, guests=guests, guest=options.guest, **f) for name, f in figures.items()]
    if options.json:
        options.json.write_text("\n".join(lines) + "\n")
    sys.stdout.write("\n".join([*lines, table(guests, options.guest, figures), ""]))
    return 0 if figures["starts"]["share"] >= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
