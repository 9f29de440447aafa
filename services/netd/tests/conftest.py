"""Fixtures: the simulated host, and netd's attachments on it."""

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

# pytest's importlib mode puts no test folder on the path; shared fixtures are imported here.
sys.path.insert(0, str(Path(__file__).parents[3]))

from services.netd.tests.pretended_host import Host, Node, pretended_host
from services.netd.tests.segment import OUTSIDE, SERVER, Segment, run, segment


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


@pytest.fixture
def lan(host: Host) -> Iterator[Segment]:
    """A segment that exists before netd, and after it."""
    with segment() as far:
        run(f"ip -n {OUTSIDE} addr add {SERVER}/24 dev lan1")
        yield far


@pytest.fixture
async def lan_node(host: Host, lan: Segment) -> AsyncIterator[Node]:
    """As `node`, on a host with a segment."""
    before = host.census()
    made = Node(host)
    await made.start()
    try:
        yield made
    finally:
        for uid in list(made.attachments.resources()):
            await made.attachments.release(uid, 1_000)
        await made.attachments.tidy()
        made.stop()
    await host.returns_to(before)
