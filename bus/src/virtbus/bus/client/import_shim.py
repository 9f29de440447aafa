"""Imports nats-py without the two thirds of it that the bus does not use.

nats-py always imports its JetStream layer, and aiohttp (for websockets) if installed. That is 280
ms of 330 ms, in every `virtbus` command. The bus calls JetStream's API itself over plain TCP;
nats-py's client needs only three header names of `nats.js`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from types import ModuleType


class Header(StrEnum):
    """The names of `nats.js.api.Header` that nats-py's client reads."""

    STATUS = "Status"
    DESCRIPTION = "Description"
    CONSUMER_STALLED = "Nats-Consumer-Stalled"


@contextmanager
def lean_import() -> Iterator[None]:
    """Provide stand-ins while nats-py is imported; modules that are loaded already are kept.

    Afterwards the names are free again: a real `import nats.js` or `aiohttp` works.
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
            # as the import system does for a module that it loads; a real one replaces it
            sys.modules["nats"].__dict__["js"] = script
