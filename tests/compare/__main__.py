"""`python -m tests.compare --old COMMIT --old COMMIT`: older trees and this one in short turns.

A program runs in all trees at once, but only one of them measures at a time, for a few seconds. So
all trees find the machine in the same state. A round has one turn of each tree; the order rotates.
The samples of finished rounds are kept as JSON lines, so that an interrupted comparison continues
with the next call of the same trees and sizes. With `--control` the first old tree runs twice. The
second one shows which bounds this machine can reach at all: its true ratios are 1.
"""

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.compare import trees
from tests.compare.figures import better_of, read_all
from tests.compare.ratios import BOUND, Better, Comparison, compare
from tests.compare.trees import Program, Tree

BUILD_OUT = trees.HERE / "build-out"
Run = dict[str, Any]


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def order(number: int, measured: Sequence[str]) -> Sequence[str]:
    """Begin each round with another tree: none always follows the same one."""
    first = number % len(measured)
    return (*measured[first:], *measured[:first])


def finished(path: Path, measured: Sequence[Tree]) -> list[Run]:
    """Return the rounds of the same trees and sizes that an earlier call has done."""
    lines = path.read_text().splitlines() if path.exists() else []
    now = _key({tree.name: tree.commit for tree in measured})
    return [
        run for run in map(json.loads, lines) if _key(run.get("trees", {}), run["sizes"]) == now
    ]


def _key(commits: dict[str, str], sizes: str | None = None) -> tuple[Any, ...]:
    return (commits, trees.sizes() if sizes is None else sizes)


def comparisons(
    runs: Sequence[Run], old: str, new: str = "new"
) -> tuple[list[Comparison], list[str]]:
    """Return every figure of two trees, and the judged figures that the new one lacks.

    A figure that only the new tree has measures a new function. It has nothing to compare with.
    """
    values: dict[str, dict[str, dict[int, float]]] = {}
    for run in runs:
        for tree, figures in run["figures"].items():
            for name, value in figures.items():
                values.setdefault(name, {}).setdefault(tree, {})[run["round"]] = value
    both, lost = [], []
    for name, by_tree in values.items():
        better = better_of(name) or Better.TOLD
        found = compare(name, better, by_tree.get(old, {}), by_tree.get(new, {}))
        if found is not None:
            both.append(found)
        elif better is not Better.TOLD and old in by_tree:
            lost.append(name)
    return both, lost


def table(found: Sequence[Comparison], control: Sequence[Comparison] = ()) -> str:
    """Format the result for people."""
    uppers = {one.name: one.upper for one in control}
    rows = [("FIGURE", "OLD", "NEW", "RATIO", "LOWER 95 %", "UPPER 95 %", "CONTROL", "N", "")]
    for one in found:
        lower, upper, same = map(_bound, (one.lower, one.upper, uppers.get(one.name)))
        numbers = (f"{one.old:.4g}", f"{one.new:.4g}", f"{one.ratio:.3f}", lower, upper, same)
        rows.append((one.name, *numbers, str(len(one.ratios)), one.verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _bound(bound: float | None) -> str:
    return "" if bound is None else f"{bound:.3f}"


def tell(runs: Sequence[Run], olds: Sequence[Tree], new: Tree) -> bool:
    """Print a table for each old tree and write the JSON; True if every judged figure holds."""
    control, _ = comparisons(runs, olds[0].name, "control")
    content, holds = [], []
    for old in olds:
        found, lost = comparisons(runs, old.name)
        figures = [_as_json(one, control) for one in found]
        content.append({"old": old.commit, "figures": figures, "lost": lost})
        sys.stdout.write(f"{old.name} against this tree\n{table(found, control)}\n")
        for name in lost:
            sys.stdout.write(f"not measured any more: {name}\n")
        judged = [one for one in found if one.better is not Better.TOLD]
        bad = [one.name for one in judged if not one.holds]
        sys.stdout.write(f"{len(judged)} judged, {len(bad)} not within {BOUND:g}\n\n")
        holds.append(bool(judged) and not bad and not lost)
    sys.stdout.flush()
    result = {"new": new.commit, "bound": BOUND, "comparisons": content}
    (BUILD_OUT / "compare.json").write_text(json.dumps(result, indent=1) + "\n")
    return all(holds)


def _as_json(one: Comparison, control: Sequence[Comparison]) -> Run:
    same = next((other.upper for other in control if other.name == one.name), None)
    return {
        "name": one.name,
        "better": one.better.value,
        "old": one.old,
        "new": one.new,
        "ratio": _told(one.ratio),
        "lower": _told(one.lower),
        "upper": _told(one.upper),
        "control": _told(same),
        "holds": one.holds,
        "ratios": [_told(ratio) for ratio in one.ratios],
    }


def _told(ratio: float | None) -> float | None:
    """JSON has no infinity."""
    return None if ratio is None or math.isinf(ratio) else round(ratio, 4)


def measure(
    program: Program, numbers: Iterable[int], measured: Sequence[Tree], keep: Callable[[Run], None]
) -> None:
    """Measure the rounds of a program in all trees."""
    names = [tree.name for tree in measured]
    commits = {tree.name: tree.commit for tree in measured}
    with trees.sessions(measured, program) as sessions:
        for number in numbers:
            begun_s = time.monotonic()
            figures = {name: read_all(sessions[name].round()) for name in order(number, names)}
            say(f"{program.name}: round {number}, {time.monotonic() - begun_s:.0f} s")
            keep(
                {
                    "program": program.name,
                    "round": number,
                    "sizes": trees.sizes(),
                    "trees": commits,
                    "figures": figures,
                }
            )


def options_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a call."""
    parser = argparse.ArgumentParser(prog="tests.compare", description=__doc__)
    parser.add_argument(
        "--old", required=True, action="append", help="a commit to compare with; repeatable"
    )
    parser.add_argument("--rounds", type=int, help="of each program; by default each has its own")
    parser.add_argument("--only", default="", help="the programs whose name holds this word")
    parser.add_argument("--control", action="store_true", help="measure the first old tree twice")
    parser.add_argument(
        "--resume",
        type=Path,
        default=BUILD_OUT / "compare.jsonl",
        metavar="FILE",
        help="the samples of an earlier call, which this call continues",
    )
    return parser.parse_args(words)


def main() -> int:
    """Return 0 if the bound of every judged figure holds, 1 otherwise."""
    options = options_of()
    # A shell starts background jobs with SIGINT ignored; a child would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    programs = trees.chosen(options.only)
    olds, new = [trees.tree_of(old) for old in options.old], trees.this_tree()
    for tree in (*olds, new):
        say(f"{tree.name} tree: {tree.commit} in {tree.folder}")
        trees.prepare(tree)
    control = [replace(olds[0], name="control")] if options.control else []
    by_name = {tree.name: tree for tree in (*olds, new, *control)}
    all_trees = [*by_name.values()]
    runs = finished(options.resume, all_trees)

    def keep(run: Run) -> None:
        runs.append(run)
        with options.resume.open("a") as file:
            file.write(json.dumps(run) + "\n")

    for program in programs:
        done = {run["round"] for run in runs if run["program"] == program.name}
        left = sorted(set(range(1, (options.rounds or program.rounds) + 1)) - done)
        if left:
            measure(program, left, all_trees, keep)
            tell([run for run in runs if run["program"] == program.name], olds, new)
    return 0 if tell(runs, olds, new) else 1


if __name__ == "__main__":
    sys.exit(main())
