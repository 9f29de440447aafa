"""Counts the modules of nodeagent that a create passes through, and the ways into the actor.

A profile function sees each call of a Python function of `virtbus.nodeagent`, from the moment at
which the record is put on the bus until the status Running is there. A module is passed if one of
its functions is called or resumed. Code that runs at import counts nothing, and neither does a
constructor that a dataclass generated. Modules that are called without a create in the same time
(the heartbeat) are left out.

Modules are of three kinds. Those behind ports: `edge`. Leaves: `core`,
the state machine (both are under the contract "core decides, it does not do"), the bundle of ports,
and the two modules in LEAVES. All others are the path.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PACKAGE = "virtbus.nodeagent."
ACTOR = (PACKAGE + "vm.actor", PACKAGE + "guest")
LEAVES = frozenset({"vm.machine", "agent_ports", "settings", "node_spec", "early_events"})


def kind(module: str) -> str:
    """Return "port", "leaf" or "path"."""
    name = module.removeprefix(PACKAGE)
    if name.startswith("edge."):
        return "port"
    return "leaf" if name.startswith("core.") or name in LEAVES else "path"


class Passed:
    """The modules that were passed; `entries` has a number for each event of the actor.

    It is the number of times that other modules entered the actor during the event's step.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.entries: list[int] = []
        self._step: FrameType | None = None

    def of(self, what: str) -> list[str]:
        return sorted(one.removeprefix(PACKAGE) for one in self.calls if kind(one) == what)

    def see(self, frame: FrameType, event: str, _: object) -> None:
        """Take a call or a return; the profile function."""
        if event == "return" and frame is self._step:
            self._step = None
        module = str(frame.f_globals.get("__name__", ""))
        generated = frame.f_code.co_filename == "<string>"
        if event != "call" or generated or not module.startswith(PACKAGE):
            return
        self.calls[module] += 1
        if module in ACTOR and frame.f_code.co_name == "_take":
            self._step = frame
            self.entries.append(1)
        elif module in ACTOR and self._step is not None and _caller(frame) not in ACTOR:
            self.entries[-1] += 1


def _caller(frame: FrameType) -> str:
    return "" if frame.f_back is None else str(frame.f_back.f_globals.get("__name__", ""))


@contextmanager
def passed() -> Iterator[Passed]:
    """Count while the context is open, in this thread."""
    found = Passed()
    sys.setprofile(found.see)
    try:
        yield found
    finally:
        sys.setprofile(None)
