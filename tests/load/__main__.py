"""`python -m tests.load`: a load run with progress, figures as JSON lines, a table, plots."""

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from tests.load import phases
from tests.load.floor import BARE, SAME, floor
from tests.load.meters import line
from tests.load.report import plot, table
from tests.load.world import Shape, World, bus_of, world

FLOOR_CREATES = 10_000
"""At most; as many as the product makes, so that one second of a shared machine decides nothing."""
BOUND_OF_FLOOR = 0.4
KIB_PER_VM = 20.0
SYNCED_S = 10.0


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


async def floor_of(shape: Shape) -> tuple[float, float, float]:
    """Run the bare loop on a bus of its own, with the same declaration.

    It runs with all durable writes, without events, and with all writes but one create in
    flight.
    """
    count = min(FLOOR_CREATES, shape.vms)
    async with bus_of(shape) as (servers, _, _):
        same, bare = [await floor(servers, count, shape.in_flight, w) for w in (SAME, BARE)]
        return same, bare, await floor(servers, count // 20, 1, SAME)


async def product(shape: Shape, *, to_the_end: bool) -> tuple[dict[str, dict[str, Any]], World]:
    """Run every phase on one control plane."""
    figures: dict[str, dict[str, Any]] = {}
    async with world(shape) as here:
        say(f"{shape.nodes} nodes ready after {here.nodes_ready_s:.1f} s")
        figures["idle"] = await phases.idle(here, 5.0 if to_the_end else 1.0)
        figures["creates"] = await phases.creates(here, shape.vms, say)
        say(f"creates: {figures['creates']}")
        if to_the_end:
            figures["idle full"] = await phases.idle(here, 5.0)
            figures["churn"] = await phases.churn(here, say)
            say(f"churn: {figures['churn']}")
            figures["deletes"] = await phases.deletes(here, say)
            say(f"deletes: {figures['deletes']}")
            records, claims = await here.left()
            figures["deletes"] |= {"records_left": records, "claims_left": claims}
        for service in here.services:
            for complaint in service.complaints()[:10]:
                say(f"{service.name}: {complaint}")
        return figures, here


async def run(shape: Shape, *, to_the_end: bool) -> tuple[dict[str, dict[str, Any]], World]:
    """Run floor, product, floor: both see the same machine."""
    say(f"{shape.vms} VMs on {shape.nodes} nodes, {shape.bus}: the floor first")
    before = await floor_of(shape)
    say(f"floor {before[0]:.0f} creates/s, {before[1]:.0f} without facts")
    figures, here = await product(shape, to_the_end=to_the_end)
    after = await floor_of(shape)
    made = figures["creates"]
    same, bare, single = [sum(rates) / 2 for rates in zip(before, after, strict=True)]
    figures["floor"] = {
        "creates_per_s": [round(before[0], 1), round(after[0], 1)],
        "accepted_share": round(made["accepted_per_s"] / same, 3),
        "running_share": round(made["running_per_s"] / same, 3),
        "without_facts_per_s": [round(before[1], 1), round(after[1], 1)],
        "accepted_share_without_facts": round(made["accepted_per_s"] / bare, 3),
        "one_in_flight_per_s": [round(before[2], 1), round(after[2], 1)],
        "accepted_share_one_in_flight": round(made["accepted_per_s"] / single, 3),
        "fair": made["status_puts_per_vm"] >= SAME.statuses and made["facts_per_vm"] >= SAME.facts,
    }
    say(f"floor: {figures['floor']}")
    return figures, here


def verdicts(figures: dict[str, dict[str, Any]], shape: Shape) -> dict[str, bool]:
    """The bounds of a run."""
    controllers_kib = figures["creates"]["pss_kib_per_vm"]["controller"]
    found = {
        "creates of floor": figures["floor"]["accepted_share"] >= BOUND_OF_FLOOR,
        "floor writes no more": figures["floor"]["fair"],
        "KiB per VM of each controller": controllers_kib / shape.controllers <= KIB_PER_VM,
    }
    if "churn" in figures:
        found["controller synced"] = figures["churn"]["controller_synced_s"] <= SYNCED_S
        found["nothing left"] = figures["deletes"]["records_left"] == 0
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.load", description=__doc__)
    parser.add_argument("--vms", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=1, choices=(1, 3))
    parser.add_argument("--sync", default="always", choices=("always", "default"))
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--controllers", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1, help="of simulated nodes")
    parser.add_argument("--churn", type=float, default=30.0, help="seconds of the steady phase")
    parser.add_argument("--creates-only", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    shape = Shape(
        vms=options.vms,
        nodes=options.nodes,
        replicas=options.replicas,
        sync=options.sync,
        in_flight=options.in_flight,
        controllers=options.controllers,
        processes=options.processes,
        churn_s=options.churn,
    )
    figures, here = asyncio.run(run(shape, to_the_end=not options.creates_only))
    lines = [line(name, bus=shape.bus, nodes=shape.nodes, **f) for name, f in figures.items()]
    if options.json:
        options.json.write_text("\n".join(lines) + "\n")
    if options.plot:
        plot(options.plot, shape, here.population)
    holds = verdicts(figures, shape)
    print("\n".join(lines))
    print(table(shape, figures, holds))
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
