"""Trees to measure: a worktree of a commit with its own environment, and its running programs."""

import hashlib
import json
import os
import select
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parents[2]
CACHE = HERE / "build-out" / "compare"
ROUND_S = 900.0
"""The time limit of a turn, and of the end of a program, which ends its turn first."""
SOURCES = (".venv/lib", "bus", "cli", "schemas", "services", "simulator", "tests")
MEASURE = Path(__file__).with_name("measure.py")


@dataclass(frozen=True, slots=True)
class Program:
    """A program of `measure.py`, and the number of its rounds. An `extra` one runs only by name."""

    name: str
    rounds: int
    extra: bool = False


PROGRAMS = (
    Program("host", 40),
    Program("fast", 30),
    Program("storm", 30),
    Program("load", 60),
    Program("churn", 30),
    Program("memory", 12),
    *(Program(name, 12, extra=True) for name in ("ten", "netd", "instructions")),
)
"""Times and CPU differ more between two rounds than memory does, so they have more rounds.

Ten creates at once are similar to a storm. So they, the 300 attachments of netd, and counts of
instructions run only by name.
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


class Session:
    """A program that runs in a tree, in a network namespace of its own, and measures by rounds."""

    def __init__(self, tree: Tree, program: Program) -> None:
        CACHE.mkdir(parents=True, exist_ok=True)
        self.tree = tree
        self._log = CACHE / f"{tree.name}-{program.name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["tools/in-host-netns", ".venv/bin/python", "-P", str(MEASURE), program.name],
                cwd=tree.folder,
                env=os.environ | {"PYTHONPATH": str(tree.folder)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,  # a signal to our group would end it in a turn, and leave guests
            )

    def figures(self) -> dict[str, list[str]]:
        """Return its next figures, none once it is ready; raise SystemExit if it ends instead."""
        out = self._process.stdout
        assert out is not None
        found = out.readline() if select.select([out], [], [], ROUND_S)[0] else b""
        if not found:
            msg = f"the {self.tree.name} tree gives no figures: {self._log}\n"
            raise SystemExit(msg + self._log.read_text(errors="replace")[-4000:])
        lines: dict[str, list[str]] = json.loads(found)
        return lines

    def round(self) -> dict[str, list[str]]:
        """Measure once; return lines of figures by their source."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return self.figures()

    def end(self) -> None:
        """Let it end its turn, and remove everything that it has started."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(ROUND_S)


@contextmanager
def sessions(trees: Sequence[Tree], program: Program) -> Iterator[dict[str, Session]]:
    """Run a program in all trees at once; each waits, except while it measures a round."""
    with ExitStack() as stack:
        found = {}
        for tree in trees:
            found[tree.name] = session = Session(tree, program)
            stack.callback(session.end)
            session.figures()
        yield found
