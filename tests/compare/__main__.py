"""`python -m tests.compare --old COMMIT`: bench, storm and load of two trees in turns.

In each round each program runs in both trees, one directly after the other. The order alternates
with each program and each round. A figure of a round is the median of the program's own
repetitions. Finished pairs are kept as JSON lines, so that an interrupted comparison can
continue.
"""

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.compare import trees
from tests.compare.figures import better_of, read_file
from tests.compare.ratios import BOUND, Better, Comparison, compare
from tests.compare.trees import Program, Tree

BUILD_OUT = trees.HERE / "build-out"
ROUNDS = 13
"""Of 12 ratios and of 13 the bound is the 10th smallest."""

Run = dict[str, Any]


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def order(number: int, place: int, old: Tree, new: Tree) -> tuple[Tree, Tree]:
    """Old first, then new first: neither tree always finds the machine as the other left it."""
    return (new, old) if (number + place) % 2 else (old, new)


def finished(path: Path, wanted: Sequence[Run]) -> list[Run]:
    """Runs of the same trees and sizes that an earlier call has done."""
    keys = [_key(run) for run in wanted]
    lines = path.read_text().splitlines() if path.exists() else []
    return [run for run in map(json.loads, lines) if _key(run) in keys]


def _key(run: Run) -> tuple[Any, ...]:
    return (run["round"], run["tree"], run["commit"], run["program"], run["arguments"])


def planned(rounds: int, programs: Sequence[Program], old: Tree, new: Tree) -> list[Run]:
    """Return all runs in their order, without their figures."""
    return [
        {
            "round": number,
            "tree": tree.name,
            "commit": tree.commit,
            "program": program.name,
            "arguments": " ".join(program.arguments),
        }
        for number in range(1, rounds + 1)
        for place, program in enumerate(programs)
        for tree in order(number, place, old, new)
    ]


def comparisons(runs: Sequence[Run]) -> tuple[list[Comparison], list[str]]:
    """Return every figure of both trees, and the names of figures that only one tree has."""
    values: dict[str, dict[str, dict[int, float]]] = {}
    for run in runs:
        for name, value in run["figures"].items():
            by_tree = values.setdefault(name, {"old": {}, "new": {}})
            by_tree[run["tree"]][run["round"]] = value
    both, alone = [], []
    for name, by_tree in values.items():
        better = better_of(name) or Better.TOLD
        found = compare(name, better, by_tree["old"], by_tree["new"])
        if found is not None:
            both.append(found)
        elif better is not Better.TOLD:
            alone.append(f"{name} ({'old' if by_tree['old'] else 'new'} tree only)")
    return both, alone


def table(found: Sequence[Comparison]) -> str:
    """Format the result for people."""
    rows = [("FIGURE", "OLD", "NEW", "RATIO", "UPPER 95 %", "N", "")]
    for one in found:
        upper = "" if one.upper is None else f"{one.upper:.3f}"
        numbers = (f"{one.old:.4g}", f"{one.new:.4g}", f"{one.ratio:.3f}", upper)
        rows.append((one.name, *numbers, str(len(one.ratios)), one.verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def tell(runs: Sequence[Run], old: Tree, new: Tree) -> bool:
    """Print the table and write the JSON; True if every judged figure holds."""
    found, alone = comparisons(runs)
    figures = [
        {
            "name": one.name,
            "better": one.better.value,
            "old": one.old,
            "new": one.new,
            "ratio": _told(one.ratio),
            "upper": _told(one.upper),
            "holds": one.holds,
            "ratios": [_told(ratio) for ratio in one.ratios],
        }
        for one in found
    ]
    content = {"old": old.commit, "new": new.commit, "bound": BOUND, "figures": figures}
    (BUILD_OUT / "compare.json").write_text(json.dumps(content | {"alone": alone}, indent=1) + "\n")
    sys.stdout.write(table(found) + "\n")
    for name in alone:
        sys.stdout.write(f"not compared: {name}\n")
    sys.stdout.flush()
    judged = [one for one in found if one.better is not Better.TOLD]
    return bool(judged) and all(one.holds for one in judged) and not alone


def _told(ratio: float | None) -> float | None:
    """JSON has no infinity."""
    return None if ratio is None or math.isinf(ratio) else round(ratio, 4)


def measured(run: Run, tree: Tree) -> Run:
    """The run with its figures."""
    program = next(one for one in trees.PROGRAMS if one.name == run["program"])
    begun = time.monotonic()
    path = trees.run(tree, program)
    took_s = time.monotonic() - begun
    say(f"round {run['round']}: {program.name}, {tree.name} tree, {took_s:.0f} s")
    return run | {
        "seconds": round(took_s, 1),
        "figures": read_file(program.name.partition(" ")[0], path),
    }


def main() -> int:
    """Return 0 if the bound of every judged figure holds, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="tests.compare", description=__doc__)
    parser.add_argument("--old", required=True, help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help="the programs whose name holds this word")
    parser.add_argument(
        "--lock", type=Path, help="a file to lock while a program is measured in both"
    )
    options = parser.parse_args()
    # A shell starts background jobs with SIGINT ignored; a child would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    programs = trees.chosen(options.only)
    both = {tree.name: tree for tree in (trees.tree_of(options.old), trees.this_tree())}
    old, new = both["old"], both["new"]
    for tree in (old, new):
        say(f"{tree.name} tree: {tree.commit} in {tree.folder}")
        trees.prepare(tree)
    wanted = planned(options.rounds, programs, old, new)
    path = BUILD_OUT / "compare.jsonl"
    runs = finished(path, wanted)
    done = {_key(run) for run in runs}
    pairs = zip(wanted[::2], wanted[1::2], strict=True)
    for pair in (pair for pair in pairs if _key(pair[0]) not in done):
        with trees.locked(options.lock):
            runs += (one := [measured(run, both[run["tree"]]) for run in pair])
        with path.open("a") as file:
            file.write("".join(json.dumps(run) + "\n" for run in one))
        if pair[0]["program"] == programs[-1].name:
            tell(runs, old, new)
    return 0 if tell(runs, old, new) else 1


if __name__ == "__main__":
    sys.exit(main())
