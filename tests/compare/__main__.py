"""`python -m tests.compare --old COMMIT --old COMMIT`: older trees and this one in turns.

In each round each program runs in all trees, one directly after the other. The order rotates with
each program and each round. A figure of a round is the median of the program's own repetitions.
The samples of finished turns are kept as JSON lines, so that an interrupted comparison continues
with the next call of the same trees and sizes. With `--control` each turn measures the first old
tree twice. The second measurement shows which bounds this machine can reach at all: its true ratios
are 1.
"""

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.compare import trees
from tests.compare.figures import better_of, read_all
from tests.compare.ratios import BOUND, Better, Comparison, compare
from tests.compare.trees import Program, Tree

BUILD_OUT = trees.HERE / "build-out"
ROUNDS = 12
"""The bound is the 10th smallest of 12 ratios, and of 13 too."""

Run = dict[str, Any]


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def order(number: int, place: int, measured: Sequence[Tree]) -> Sequence[Tree]:
    """Begin each turn with another tree: none always finds the machine as the same one left it."""
    first = (number + place) % len(measured)
    return (*measured[first:], *measured[:first])


def finished(path: Path, turns: Sequence[Sequence[Run]]) -> list[Run]:
    """Runs of the same trees and sizes that an earlier call has done."""
    keys = [_key(run) for turn in turns for run in turn]
    lines = path.read_text().splitlines() if path.exists() else []
    return [run for run in map(json.loads, lines) if _key(run) in keys]


def _key(run: Run) -> tuple[Any, ...]:
    return (run["round"], run["tree"], run["commit"], run["program"], run["sizes"])


def planned(rounds: int, programs: Sequence[Program], measured: Sequence[Tree]) -> list[list[Run]]:
    """Return all turns in their order: the runs of one program in one round, without figures."""
    return [
        [
            {
                "round": number,
                "tree": tree.name,
                "commit": tree.commit,
                "program": program.name,
                "sizes": trees.sizes(),
            }
            for tree in order(number, place, measured)
        ]
        for number in range(1, rounds + 1)
        for place, program in enumerate(programs)
    ]


def comparisons(
    runs: Sequence[Run], old: str, new: str = "new"
) -> tuple[list[Comparison], list[str]]:
    """Return every figure of two trees, and the judged figures that the new one lacks.

    A figure that only the new tree has measures a new function. It has nothing to compare with.
    """
    values: dict[str, dict[str, dict[int, float]]] = {}
    for run in runs:
        for name, value in run["figures"].items():
            values.setdefault(name, {}).setdefault(run["tree"], {})[run["round"]] = value
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


def measured(run: Run, tree: Tree) -> Run:
    """The run with its figures."""
    program = next(one for one in trees.PROGRAMS if one.name == run["program"])
    begun = time.monotonic()
    lines = trees.run(tree, program)
    took_s = time.monotonic() - begun
    say(f"round {run['round']}: {program.name}, {tree.name} tree, {took_s:.0f} s")
    return run | {"seconds": round(took_s, 1), "figures": read_all(lines)}


def options_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a call."""
    parser = argparse.ArgumentParser(prog="tests.compare", description=__doc__)
    parser.add_argument(
        "--old", required=True, action="append", help="a commit to compare with; repeatable"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help="the programs whose name holds this word")
    parser.add_argument(
        "--lock", type=Path, help="a file to lock while a program is measured in all trees"
    )
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
    turns = planned(options.rounds, programs, [*by_name.values()])
    runs = finished(options.resume, turns)
    done = {_key(run) for run in runs}
    for turn in (turn for turn in turns if not done.issuperset(map(_key, turn))):
        with trees.locked(options.lock):
            runs += (one := [measured(run, by_name[run["tree"]]) for run in turn])
        with options.resume.open("a") as file:
            file.write("".join(json.dumps(run) + "\n" for run in one))
        if turn[0]["program"] == programs[-1].name:
            tell(runs, olds, new)
    return 0 if tell(runs, olds, new) else 1


if __name__ == "__main__":
    sys.exit(main())
