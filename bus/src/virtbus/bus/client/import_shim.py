"""Imports nats-py without the parts that the bus does not use.

nats-py imports its JetStream layer, and aiohttp (for websockets) if installed. Both together take
280 of 330 ms of the import, in each `virtbus` command. This package calls JetStream's API itself,
over TCP, and needs neither. nats-py's client needs only three header names of `nats.js`.

nats-py's client also looks up its own version, which it sends to the server. The search imports
`importlib.metadata` and takes 20 ms. The server gets virtbus' version instead.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from types import ModuleType

from virtbus.schemas.version import VERSION


class Header(StrEnum):
    """The names of `nats.js.api.Header` that nats-py's client reads."""

    STATUS = "Status"
    DESCRIPTION = "Description"
    CONSUMER_STALLED = "Nats-Consumer-Stalled"


@contextmanager
def lean_import() -> Iterator[None]:
    """Replace unused modules by stand-ins while the context is open. Loaded modules stay.

    After the context, a real `import nats.js` or `import aiohttp` works.
    """
    api = ModuleType("nats.js.api")
    api.__dict__["Header"] = Header
    script = ModuleType("nats.js")
    script.__dict__["api"] = api
    metadata = ModuleType("importlib.metadata")
    metadata.__dict__["version"] = lambda _distribution: VERSION
    stand_ins: dict[str, ModuleType | None] = {
        "aiohttp": None,
        "importlib.metadata": metadata,
        "nats.js": script,
        "nats.js.api": api,
    }
    placed = {name: module for name, module in stand_ins.items() if name not in sys.modules}
    sys.modules.update(placed)  # type: ignore[arg-type]  # None makes the import fail
    try:
        yield
    finally:
        for name in placed:
            sys.modules.pop(name, None)
        if "nats.js" in placed and "nats" in sys.modules:
            # nats-py's client reads `nats.js` at run time. A real import later replaces it.
            sys.modules["nats"].__dict__["js"] = script
