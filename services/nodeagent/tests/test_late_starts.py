"""Starts and connections that libvirt ends late, or while it does not answer."""

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import libvirt
import pytest
from services.nodeagent.tests.pretended_node import uid

from virtbus.bus.runtime.sources import REAL
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.domain_xml import domain_name
from virtbus.nodeagent.core.ports import DomainFacts, DomainState
from virtbus.nodeagent.edge import libvirt_links, libvirt_starts
from virtbus.nodeagent.edge.libvirt_calls import Threads
from virtbus.nodeagent.edge.libvirt_links import LibvirtLinks
from virtbus.nodeagent.edge.libvirt_starts import LibvirtStarts
from virtbus.nodeagent.vm.operations.start import await_start
from virtbus.schemas.errors import Code, VirtbusError


class Libvirtd:
    """A libvirtd that hangs in its lookups until `release` is set."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.asked = threading.Event()
        self.got: list[os.stat_result] = []
        self.started = threading.Event()

    def lookupByUUIDString(self, _uid: str) -> "Libvirtd":  # noqa: N802  libvirt's name
        self.asked.set()
        self.release.wait()
        return self

    def setKeepAlive(self, *_: object) -> None: ...  # noqa: N802

    def registerCloseCallback(self, *_: object) -> None: ...  # noqa: N802

    def close(self) -> None: ...

    def name(self) -> str:
        return domain_name(uid(1))

    def UUIDString(self) -> str:  # noqa: N802
        return uid(1)

    def FDAssociate(self, _name: str, files: list[int]) -> None:  # noqa: N802
        self.got += [os.fstat(one) for one in files]

    def createWithFlags(self, _flags: int) -> None:  # noqa: N802
        self.started.set()


@pytest.fixture
def libvirtd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Libvirtd]:
    made = Libvirtd()
    monkeypatch.setattr(libvirt, "open", lambda _uri: made)
    monkeypatch.setattr(libvirt_starts, "START_TIMEOUT_S", 0.2)
    yield made
    made.release.set()


def made(stuck_limit: int = 4) -> tuple[LibvirtStarts, Threads]:
    threads = Threads("test")
    links = LibvirtLinks("qemu:///hangs", threads, at_once=2, stuck_limit=stuck_limit)
    return LibvirtStarts(links, 2, in_process=False), threads


def holders(path: Path) -> int:
    """Return how many descriptors of this process are of a file."""
    found = 0
    for one in list(Path("/proc/self/fd").iterdir()):
        try:
            found += one.samefile(path)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_connection_that_opens_too_late_is_closed(
    monkeypatch: pytest.MonkeyPatch, *, cancelled: bool
) -> None:
    libvirtd, closed = Libvirtd(), threading.Event()
    monkeypatch.setattr(libvirtd, "close", closed.set)
    monkeypatch.setattr(libvirt, "open", libvirtd.lookupByUUIDString)
    monkeypatch.setattr(libvirt_links, "OPEN_TIMEOUT_S", 0.2)
    threads = Threads("test")
    links = LibvirtLinks("qemu:///hangs", threads, at_once=1, stuck_limit=4)

    async def reserve() -> None:
        with pytest.raises(VirtbusError, match="libvirtd's log"):
            await links.reserve(lambda _connection: None, lost=lambda: None)

    async with asyncio.TaskGroup() as group:
        opening = group.create_task(reserve())
        assert await asyncio.to_thread(libvirtd.asked.wait, 5)
        if cancelled:
            opening.cancel()
    assert not closed.is_set()
    libvirtd.release.set()
    assert await asyncio.to_thread(closed.wait, 5)
    threads.close()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_late_start_gets_the_file_of_its_own_guest(
    libvirtd: Libvirtd, tmp_path: Path, *, cancelled: bool
) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.write_bytes(b"own")
    other.write_bytes(b"other")
    starts, threads = made()
    lent = os.open(own, os.O_RDWR)

    async def start() -> None:
        with pytest.raises(VirtbusError, match="libvirtd's log"):
            await starts.run(uid(1), paused=False, files={"data": lent})

    async with asyncio.TaskGroup() as group:
        starting = group.create_task(start())
        assert await asyncio.to_thread(libvirtd.asked.wait, 5)
        if cancelled:
            starting.cancel()
    assert starts.under_way(uid(1))
    os.close(lent)
    reused = os.open(other, os.O_RDWR)
    assert reused == lent
    try:
        libvirtd.release.set()
        assert await asyncio.to_thread(libvirtd.started.wait, 5)
        assert [one.st_ino for one in libvirtd.got] == [own.stat().st_ino]
        async with asyncio.timeout(5):
            while holders(own):
                await asyncio.sleep(0.01)
        assert not starts.under_way(uid(1))
    finally:
        os.close(reused)
        threads.close()


async def test_a_start_that_never_begins_keeps_no_file_open(
    libvirtd: Libvirtd, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.write_bytes(b"own")
    starts, threads = made(stuck_limit=0)
    with own.open("rb") as lent:
        with pytest.raises(VirtbusError, match="restart libvirtd"):
            await starts.run(uid(1), paused=False, files={"data": lent.fileno()})
        assert holders(own) == 1
    assert not libvirtd.asked.is_set()
    threads.close()


async def test_a_start_of_an_earlier_agent_is_followed_while_libvirt_does_not_answer() -> None:
    down = VirtbusError(Code.UNAVAILABLE, "libvirt_down", "libvirt does not answer")
    answers: list[DomainFacts | VirtbusError] = [
        down,
        DomainFacts(uid(1), DomainState.STARTING),
        down,
    ]

    async def facts(_uid: str) -> DomainFacts:
        answer = answers.pop(0) if answers else DomainFacts(uid(1), DomainState.RUNNING)
        if isinstance(answer, VirtbusError):
            raise answer
        return answer

    bus, hypervisor = SimpleNamespace(sources=REAL), SimpleNamespace(facts=facts)
    tools = cast("AgentPorts", SimpleNamespace(bus=bus, hypervisor=hypervisor))
    assert await await_start(uid(1), tools) == "started"
