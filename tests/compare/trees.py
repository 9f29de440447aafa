"""Trees to measure: a worktree of a commit with its own environment, and runs of its programs."""

import fcntl
import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parents[2]
CACHE = HERE / "build-out" / "compare"
RUN_S, END_S = 900.0, 60.0
SOURCES = (".venv/lib", "bus", "cli", "schemas", "services", "simulator", "tests")


MEASURE = Path(__file__).with_name("measure.py")


@dataclass(frozen=True, slots=True)
class Program:
    """A program of `measure.py`. An `extra` one runs only if it is named."""

    name: str
    extra: bool = False


PROGRAMS = (
    *(Program("host"), Program("load")),
    *(Program(name, extra=True) for name in ("ten", "netd", "instructions")),
)
"""The steps of the bench are parts of creates. Ten creates at once are similar to a storm. So they,
the 300 attachments of netd, and counts of instructions run only by name.
"""


def sizes() -> str:
    """Return a name for the sizes and clocks of all programs."""
    return hashlib.sha256(MEASURE.read_bytes()).hexdigest()[:8]


def chosen(only: str) -> list[Program]:
    """Return the programs whose name contains the word; without one, all except the extra ones."""
    return [one for one in PROGRAMS if (only in one.name if only else not one.extra)]


@dataclass(frozen=True, slots=True)
class Tree:
    """A folder with a clone's files, and its state by name."""

    name: str
    folder: Path
    commit: str


def _git(*words: str, folder: Path = HERE) -> str:
    done = subprocess.run(["git", *words], cwd=folder, check=True, stdout=subprocess.PIPE)
    return done.stdout.decode(errors="replace").strip()


def this_tree() -> Tree:
    """Return the clone in its current state, with uncommitted changes."""
    changes = _git("diff", "HEAD")
    mark = f"+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else ""
    return Tree("new", HERE, _git("rev-parse", "HEAD") + mark)


def tree_of(commit: str) -> Tree:
    """Return a worktree of a commit in the cache, by its short name; make it if it is missing."""
    full = _git("rev-parse", "--verify", f"{commit}^{{commit}}")
    folder = CACHE / full[:12]
    if not (folder / ".git").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        _git("worktree", "prune")
        _git("worktree", "add", "--detach", str(folder), full)
    return Tree(full[:7], folder, full)


def prepare(tree: Tree) -> None:
    """Install its locked packages, and compile everything, so that no run compiles."""
    subprocess.run(["tools/uv", "sync", "--locked", "--quiet"], cwd=tree.folder, check=True)
    words = [".venv/bin/python", "-m", "compileall", "-q", "-q", *SOURCES]
    # some packages ship files for newer Pythons
    subprocess.run(words, cwd=tree.folder, check=False)


@contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Hold a lock, so that only one measurement runs on this machine."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(tree: Tree, program: Program) -> dict[str, list[str]]:
    """Run a program of a tree in a network namespace of its own; return its lines by their source.

    A run that writes no figures raises SystemExit with its log.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    figures = CACHE / f"{tree.name}-{program.name}.json"
    log = figures.with_suffix(".log")
    figures.unlink(missing_ok=True)
    words = [".venv/bin/python", "-P", str(MEASURE), program.name, str(figures)]
    environment = os.environ | {"PYTHONPATH": str(tree.folder)}
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["tools/in-host-netns", *words],
            cwd=tree.folder,
            env=environment,
            stdout=out,
            stderr=out,
        )
        try:
            process.wait(RUN_S)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # it then leaves nothing behind
                process.wait(END_S)
    if not figures.exists():
        msg = f"{program.name} of the {tree.name} tree ended without figures: {log}\n"
        raise SystemExit(msg + log.read_text(errors="replace")[-4000:])
    lines: dict[str, list[str]] = json.loads(figures.read_text())
    return lines
