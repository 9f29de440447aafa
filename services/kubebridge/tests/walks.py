"""Records the calls of reconciles, and counts how often one returns to a module that it has left.

The profile hook of the interpreter reports each call of a Python function of the bridge, below
`Reconciler.reconcile`. A coroutine that waited is the same call when it continues. Calls within a
module are no moves. Code outside of the bridge is no stop: what it calls belongs to its caller.

Two kinds of calls are no stops. Neither is chosen by hand.

- A call of a word. A word is a module that imports no other module of the bridge, such as the
  reader of JSON or the actions. It is to the bridge what the standard library is.
- A call of a helper: a call that returns without having called another module, except words.
"""

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from pathlib import Path
from types import FrameType

import virtbus.kubebridge

FOLDER = Path(virtbus.kubebridge.__file__).parent
ROOT = ("edge/runtime/reconciler.py", "reconcile")
RESUMED = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR


@dataclass(eq=False)
class Call:
    """A call of a function of the bridge. `what` is the kind that a reconcile is about."""

    module: str
    what: str = ""
    calls: list["Call"] = field(default_factory=list)


class Walks:
    """The calls of `root`, as trees; without one, the outermost calls of the bridge."""

    def __init__(self, root: tuple[str, str] | None) -> None:
        self._root = root
        self.calls: list[Call] = []
        self._stack: list[Call | None] = []
        """The last call of the bridge in each frame; None above all reconciles."""
        self._resumed: dict[FrameType, Call] = {}

    def see(self, frame: FrameType, event: str, _: object) -> None:
        """Take a call or a return; the profile function."""
        if event == "call":
            caller = self._stack[-1] if self._stack else None
            self._stack.append(self._resumed.get(frame) or self._called(frame, caller) or caller)
        elif event == "return" and self._stack:
            self._stack.pop()

    def _called(self, frame: FrameType, caller: Call | None) -> Call | None:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(FOLDER):
            return None
        call = Call(str(path.relative_to(FOLDER)))
        if caller is not None:
            caller.calls.append(call)
        elif self._root in {None, (call.module, frame.f_code.co_name)}:
            call.what = frame.f_locals["key"].kind.kind if self._root else ""
            self.calls.append(call)
        else:
            return None
        if frame.f_code.co_flags & RESUMED:
            self._resumed[frame] = call
        return call


@contextmanager
def walking(root: tuple[str, str] | None = ROOT) -> Iterator[Walks]:
    """Record while the context is open, in this thread."""
    walks = Walks(root)
    sys.setprofile(walks.see)
    try:
        yield walks
    finally:
        sys.setprofile(None)


def words() -> frozenset[str]:
    """Return the modules that import no other module of the bridge."""
    return frozenset(
        str(path.relative_to(FOLDER))
        for path in FOLDER.rglob("*.py")
        if not any(
            (one.module or "").startswith("virtbus.kubebridge")
            for one in ast.walk(ast.parse(path.read_text()))
            if isinstance(one, ast.ImportFrom)
        )
    )


def moves(call: Call) -> Iterator[Call]:
    """Yield the calls that go from the module of a call into others."""
    for one in call.calls:
        if one.module == call.module:
            yield from moves(one)
        else:
            yield one


def stays(call: Call) -> Iterator[str]:
    """Yield the modules in the order in which they run; each return to a caller counts."""
    yield call.module
    for one in moves(call):
        yield from stays(one)
        yield call.module


def visits(call: Call) -> Iterator[str]:
    """Yield the module of each call that comes from another module."""
    yield call.module
    for one in moves(call):
        yield from visits(one)


def stops(call: Call, leave_out: frozenset[str]) -> list[str]:
    """Return the visits in order, without those of words and helpers."""
    below = [name for one in moves(call) for name in stops(one, leave_out)]
    others = any(one not in leave_out for one in list(visits(call))[1:])
    return [call.module, *below] if others and call.module not in leave_out else below


def calls_back(call: Call, waiting: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the ways to each call into a module that waits for another one below it."""
    way = (*waiting, call.module)
    found = [way] if call.module in waiting else []
    return found + [back for one in moves(call) for back in calls_back(one, way)]


def again(names: list[str]) -> list[str]:
    """Return the names that came before."""
    return [name for place, name in enumerate(names) if name in names[:place]]
