"""`make sim SEEDS=n [SEED=k]`: runs many seeds, or one with its whole schedule."""

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.sim.run import OF_BACKUPS, Verdict, run
from tests.sim.users import Plan

SHOWN = 5


def told(verdict: Verdict, *, whole: bool) -> str:
    """Print a failing seed: the violation, and the events before it."""
    lines = [f"seed {verdict.seed}: {len(verdict.violations)} violation(s)"]
    lines += [f"  {violation}" for violation in verdict.violations]
    lines.append(f"  faults: {', '.join(verdict.faults)}")
    lines.append(verdict.schedule if not whole else "\n".join(verdict.lines))
    lines.append(f"replay: make sim SEED={verdict.seed}")
    return "\n".join(lines)


def one(seed: int, plan: Plan | None) -> int:
    """Run one seed with its whole schedule; return 1 if an invariant was violated."""
    verdict = run(seed, keep_all=True, plan=plan)
    print(told(verdict, whole=True))
    print(f"trace {verdict.trace_hash}, {verdict.steps} steps, {verdict.cpu_s:.2f} s of CPU")
    return 0 if verdict.clean else 1


def many(first: int, count: int, workers: int, plan: Plan | None) -> int:
    """Run the seeds `first` to `first + count - 1`; return 1 if one failed."""
    began_s = time.monotonic()
    failed: list[Verdict] = []
    cpu_s = 0.0
    with ProcessPoolExecutor(workers) as pool:
        for verdict in pool.map(partial(run, plan=plan), range(first, first + count), chunksize=4):
            cpu_s += verdict.cpu_s
            if not verdict.clean:
                failed.append(verdict)
                print(f"seed {verdict.seed}: {verdict.violations[0]}", flush=True)
    for verdict in failed[:SHOWN]:
        print(told(verdict, whole=False))
    print(
        f"{count} seeds, {len(failed)} failed {[v.seed for v in failed][:50]}; "
        f"{cpu_s / count:.2f} s of CPU a seed, {time.monotonic() - began_s:.0f} s in all"
    )
    return 1 if failed else 0


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--seed", type=int, help="only this one, with its whole schedule")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--backups", action="store_true", help="few VMs, and many backups")
    asked = parser.parse_args()
    plan = OF_BACKUPS if asked.backups else None
    if asked.seed is not None:
        return one(asked.seed, plan)
    return many(asked.first, asked.seeds, asked.workers, plan)


if __name__ == "__main__":
    sys.exit(main())
