"""`python -m tests.bench [--runs N] [--only WORD] [--json FILE]`: measures and checks bounds."""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from tests.bench import data, measures
from tests.bench.attach_growth import KINDS, attach_growth
from tests.bench.cri_pods import cri_pods
from tests.bench.criproxy import criproxy
from tests.bench.figures import Figure, as_json, as_table
from tests.bench.netd_growth import netd_growth
from tests.bench.stage import stage

Measure = Callable[[], Awaitable[list[Figure]]]


async def main() -> int:
    """Return 0 if every bound holds, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="interleaved runs of each comparison")
    parser.add_argument("--only", default="", help="only the measures whose name holds this word")
    parser.add_argument("--json", type=Path, help="also write one JSON line a figure here")
    options = parser.parse_args()
    figures: list[Figure] = []

    async def take(name: str, measure: Measure, *, extra: bool = False) -> None:
        """Measure if the name holds the word; for an extra one, if it begins with the word.

        `make compare` names measures of both trees by one letter. Extra ones are new.
        """
        if name.startswith(options.only) if extra else options.only in name:
            sys.stderr.write(f"measuring: {name}\n")
            found = await measure()
            sys.stderr.write("".join(f"{as_json(one)}\n" for one in found))  # a later one may fail
            figures.extend(found)

    runs = options.runs
    await take("criproxy", lambda: criproxy(runs), extra=True)
    await take("cri pods", cri_pods, extra=True)
    for kind in KINDS:
        await take(f"growth {kind.name}", partial(attach_growth, kind), extra=True)
    async with stage() as here:
        raw = await measures.raw_of(here)
        default = {"bound": 1.15}
        await take(
            "create builtin",
            lambda: measures.create_and_delete(
                here, raw, "default", runs, label="built-in network", **default
            ),
        )
        await take(
            "create cni",
            lambda: measures.create_and_delete(
                here, raw, "bench", runs, label="CNI bridge", **default
            ),
        )
        await take("steps", lambda: measures.steps(here, runs))
        await take("ten", lambda: measures.ten_at_once(here, raw, max(runs // 5, 3)))
        await take("cpu builtin", lambda: measures.cpu_per_create(here, "default", runs, 25))
        await take("cpu cni", lambda: measures.cpu_per_create(here, "bench", runs, 55))
        await take("command", lambda: measures.command(here, raw, runs))
        await take("hops", lambda: measures.bus_hops(here))
        await take("memory", lambda: measures.memory(here, 10))
        await take("netd", lambda: netd_growth(here))
        await take("clone", lambda: data.linked_clone(here, raw, runs), extra=True)
        await take("gap", lambda: data.snapshot_gap(here, raw, max(runs // 4, 1)), extra=True)
    async with stage(VIRTBUS_IMAGE_ADDRESSES='["127.0.0.0/8"]') as here:
        await take("pull", lambda: data.pull(here, max(runs // 5, 1)), extra=True)
    async with stage(VIRTBUS_FAST_START="true") as here:
        raw = await measures.raw_of(here)
        await take(
            "fast builtin",
            lambda: measures.create_and_delete(
                here, raw, "default", runs, label="built-in, no CPU queries", bound=1.20
            ),
        )
        await take(
            "fast cni",
            lambda: measures.create_and_delete(
                here, raw, "bench", runs, label="CNI bridge, no CPU queries", bound=1.20
            ),
        )
    lines = [as_json(figure) for figure in figures]
    if options.json:
        options.json.write_text("\n".join(lines) + "\n")
    sys.stdout.write("\n".join(lines) + "\n\n" + as_table(figures) + "\n")
    return 0 if all(figure.holds is not False for figure in figures) else 1


sys.exit(asyncio.run(main()))
