"""Trees to measure: a worktree of a commit with its own environment, and runs of its programs."""

import fcntl
import hashlib
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


@dataclass(frozen=True, slots=True)
class Program:
    """The programs of each tree. An `extra` one runs only if it is named."""

    name: str
    module: str
    arguments: tuple[str, ...]
    extra: bool = False


def _bench(name: str, word: str, *, extra: bool = False) -> Program:
    return Program(name, "tests.bench", ("--runs", "3", "--only", word), extra)


PROGRAMS = (
    _bench("bench creates", "i"),  # create, cpu and fast, each with builtin and cni
    _bench("bench others", "o"),  # command, hops, memory
    Program("storm", "tests.load.storm", ("--guests", "6", "--rounds", "2")),
    Program(
        "load",
        "tests.load",
        ("--vms", "500", "--nodes", "20", "--controllers", "1", "--churn", "2"),
    ),
    _bench("bench ten", "ten", extra=True),
    _bench("bench netd", "netd", extra=True),
)
"""All programs except the extra ones take about 106 s of two quiet cores per tree and round.

The steps of the bench are parts of creates. Ten creates at once are similar to a storm. So they,
and the 300 attachments of netd, run only by name.
"""


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
    """Return a worktree of a commit in the cache; make it if it is missing."""
    full = _git("rev-parse", "--verify", f"{commit}^{{commit}}")
    folder = CACHE / full[:12]
    if not (folder / ".git").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        _git("worktree", "prune")
        _git("worktree", "add", "--detach", str(folder), full)
    return Tree("old", folder, full)


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


def run(tree: Tree, program: Program) -> Path:
    """Run a program of a tree in a network namespace of its own; return its JSON lines.

    Exit code 1 means that one of the program's own bounds was missed, which is not judged here.
    A run that writes no figures raises SystemExit with its log.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    figures = CACHE / f"{tree.name}-{program.name.replace(' ', '-')}.jsonl"
    log = figures.with_suffix(".log")
    figures.unlink(missing_ok=True)
    words = [".venv/bin/python", "-m", program.module, *program.arguments, "--json", str(figures)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["tools/in-host-netns", *words], cwd=tree.folder, stdout=out, stderr=out
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
    return figures
