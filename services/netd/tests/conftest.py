"""Fixtures: the simulated host, and netd's attachments on it."""

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

# pytest's importlib mode puts no test folder on the path; shared fixtures are imported here.
sys.path.insert(0, str(Path(__file__).parents[3]))

from services.netd.tests.pretended_host import Host, Node, pretended_host


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with pretended_host(tmp_path) as made:
        yield made


@pytest.fixture
async def node(host: Host) -> AsyncIterator[Node]:
    """Attachments that have recovered; afterwards the host is unchanged."""
    before = host.census()
    made = Node(host)
    await made.start()
    try:
        yield made
    finally:
        await made.end()
    await host.returns_to(before)
