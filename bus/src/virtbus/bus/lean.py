"""Importing nats-py without the two thirds of it that the bus does not use.

nats-py imports its JetStream layer always and aiohttp (for websockets) where it finds it: 280 ms of
the 330 that its import takes, paid by every `virtbus` command. The bus speaks JetStream's API
itself and plain TCP; of `nats.js` the client needs three header names.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from types import ModuleType


class Header(StrEnum):
    """The names that nats-py's client reads of `nats.js.api.Header`."""

    STATUS = "Status"
    DESCRIPTION = "Description"
    CONSUMER_STALLED = "Nats-Consumer-Stalled"


@contextmanager
def lean_import() -> Iterator[None]:
    """Stand-ins while nats-py is imported; modules that are loaded already stay as they are.

    Afterwards the names are free again: another's real `import nats.js` or `aiohttp` works.
    """
    api = ModuleType("nats.js.api")
    api.__dict__["Header"] = Header
    script = ModuleType("nats.js")
    script.__dict__["api"] = api
    stand_ins: dict[str, ModuleType | None] = {
        "aiohttp": None,
        "nats.js": script,
        "nats.js.api": api,
    }
    placed = {name: module for name, module in stand_ins.items() if name not in sys.modules}
    sys.modules.update(placed)  # type: ignore[arg-type]  # None: "there is no such module"
    try:
        yield
    finally:
        for name in placed:
            sys.modules.pop(name, None)
        if "nats.js" in placed and "nats" in sys.modules:
            # what the import system does for a module that it loads itself; a real one replaces it
            sys.modules["nats"].__dict__["js"] = script
