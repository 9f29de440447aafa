"""The resolver's process: it outlives netd, has one successor, and ends with the last guest."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from services.netd.tests.dns_clients import (
    GATEWAY,
    Client,
    asking,
    controllers,
    netd,
    upstream,
)
from services.netd.tests.pretended_host import Host, Node, eventually

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.netd import names_keeper, resolver_start
from virtbus.netd.core.names import netns
from virtbus.netd.edge.resolver_launch import launch
from virtbus.netd.fleet_names import FRESH_S
from virtbus.netd.name_questions import NameQuestions
from virtbus.schemas.names import NameAnswer

pytestmark = pytest.mark.integration

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
B = "0192f0c1-2d3e-7abc-8def-00000000000b"
WEB = {"namespace": "shop", "name": "web"}
DB = {"namespace": "shop", "name": "db"}
FAR = NameAnswer(found=True, node="n2", namespace="shop", name="far", addresses=("10.9.0.5",))


def processes(host: Host) -> set[int]:
    """Return the resolvers of this host."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            argv = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if "virtbus.netd.resolver_process" in argv and str(host.tmp) in argv[3]:
            found.add(int(path.parent.name))
    return found


async def client(node: Node, uid: str, **more: str) -> Client:
    await node.attach(uid, **more)
    return await Client(node, uid).prepare()


async def release(node: Node) -> None:
    for uid in list(node.attachments.resources()):
        await node.attachments.release(uid, 1_000)
    await node.attachments.tidy()


async def test_names_stay_while_netd_is_away_and_its_successor_continues(host: Host) -> None:
    before = host.census()
    node, server = Node(host), MemoryServer()
    async with controllers(server, far=FAR), netd(node, server):
        web, db = await client(node, A, **WEB), await client(node, B, **DB)
        assert await web.found("far.shop.vm.internal") == ["10.9.0.5"]
    async with upstream() as other:
        for tcp in (False, True):
            assert await web.found("db.shop.vm.internal", tcp=tcp) == [str(db.ip)]
            assert await web.found("www.example", tcp=tcp) == ["203.0.113.7"]
        await asyncio.sleep(FRESH_S)
        assert await web.found("far.shop.vm.internal") == ["10.9.0.5"]
        assert await web.found("new.shop.vm.internal") == "SERVFAIL"
        assert len(other.names) == 2
    there = processes(host)
    assert len(there) == 1
    node.doors.files.remove(B)  # its VM has ended meanwhile
    async with netd(node, server), controllers(server, far=FAR):
        await eventually(lambda: asking() == {str(web.ip)})
        assert processes(host) == there
        assert await web.found("db.shop.vm.internal") == "NXDOMAIN"
        assert await web.found("far.shop.vm.internal") == ["10.9.0.5"]
        node.host.namespaces.remove(netns(B))
        await release(node)
    await eventually(lambda: not processes(host))
    await host.returns_to(before)


@asynccontextmanager
async def asking_without_pause(guest: Client) -> AsyncIterator[list[float]]:
    """Ask for the guest's own name again and again; yields the seconds that each answer took."""
    took: list[float] = []
    over = asyncio.Event()

    async def ask() -> None:
        while not over.is_set():
            begun_s = time.monotonic()
            assert await guest.found("web.shop.vm.internal") == [str(guest.ip)]
            took.append(time.monotonic() - begun_s)
            await asyncio.sleep(0.005)

    async with asyncio.TaskGroup() as group:
        group.create_task(ask())
        yield took
        over.set()


async def test_no_query_is_lost_while_netd_ends_and_starts(host: Host) -> None:
    before = host.census()
    node, server = Node(host), MemoryServer()
    async with netd(node, server):
        web = await client(node, A, **WEB)
    async with asking_without_pause(web) as took:
        while len(took) < 50:
            async with netd(node, server):
                await asyncio.sleep(0.1)
    async with netd(node, server):
        await release(node)
    await host.returns_to(before)


async def test_a_resolver_that_is_killed_is_started_again_with_all_names(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names_keeper, "FIRST_RETRY_S", 3.0)
    before = host.census()
    node, server = Node(host), MemoryServer()
    async with netd(node, server):
        web, db = await client(node, A, **WEB), await client(node, B, **DB)
        (first,) = processes(host)
        assert Path(f"/proc/{first}/cwd").readlink() == Path("/")
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: not processes(host))
        with pytest.raises(TimeoutError):  # a refusal would end the guest's lookup
            await web.ask("db.shop.vm.internal", timeout_s=0.5)
        await eventually(lambda: bool(processes(host)))
        await eventually(lambda: asking() == {str(web.ip), str(db.ip)})
        assert await web.found("db.shop.vm.internal") == [str(db.ip)]
        await release(node)
    await eventually(lambda: not processes(host))
    await host.returns_to(before)


async def test_a_netd_of_other_code_replaces_the_resolver_when_it_knows_all_vms(
    host: Host,
) -> None:
    before = host.census()
    node, server = Node(host), MemoryServer()
    async with netd(node, server):
        web = await client(node, A, **WEB)
    (first,) = processes(host)
    node.site_of_names = replace(node.site_of_names, code="2")
    node.wire()
    async with node.doors.resolver.running(NameQuestions(MemoryBus(server, "netd"), "n1").ask):
        await eventually(lambda: len(processes(host)) == 2)
        assert await web.found("web.shop.vm.internal") == [str(web.ip)]
    node.stop()
    await eventually(lambda: processes(host) == {first})
    async with netd(node, server):
        await eventually(lambda: len(processes(host)) == 1 and first not in processes(host))
        await eventually(lambda: asking() == {str(web.ip)})
        assert await web.found("web.shop.vm.internal") == [str(web.ip)]
    node.site_of_names = replace(node.site_of_names, domain="")
    async with netd(node, server):
        await eventually(lambda: not processes(host))
        assert node.doors.resolver.addresses == ()
        await release(node)
    await host.returns_to(before)


def python_that(does: str, host: Host, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Start further resolvers by a script that does something before it runs Python."""
    script = host.tmp / "python"
    script.write_text(f'#!/bin/sh\n{does}\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return script


@pytest.mark.parametrize("does", ["sleep 2", "mkdir $(dirname $0)/tried && exit 1"])
async def test_a_first_start_that_is_slow_or_fails_delays_names_and_not_netd(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, does: str
) -> None:
    before = host.census()
    node, server = Node(host), MemoryServer()
    monkeypatch.setattr(names_keeper, "START_S", 0.1)
    python_that(does, host, monkeypatch)
    async with netd(node, server):
        assert not processes(host)
        assert node.doors.resolver.addresses == (IPv4Address(GATEWAY),)
        web = await client(node, A, **WEB)
        assert await web.found("web.shop.vm.internal") == [str(web.ip)]
        await release(node)
    codes = {record.__dict__.get("code") for record in caplog.records}
    assert ("resolver_start" in codes) == ("exit" in does)
    assert "resolver_port" not in codes
    await host.returns_to(before)


async def test_a_resolver_stays_while_its_successor_cannot_be_started(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(names_keeper, "FIRST_RETRY_S", 0.05)
    before = host.census()
    node, server = Node(host), MemoryServer()
    async with netd(node, server):
        web = await client(node, A, **WEB)
    former = processes(host)
    node.site_of_names = replace(node.site_of_names, code="2")
    script = python_that("exit 1", host, monkeypatch)
    async with netd(node, server):
        await eventually(lambda: "resolver_start" in str([one.__dict__ for one in caplog.records]))
        assert processes(host) == former
        assert await web.found("web.shop.vm.internal") == [str(web.ip)]
        script.write_text(script.read_text().replace("exit 1", ""))
        await eventually(lambda: len(processes(host)) == 1 and processes(host) != former)
        await release(node)
    await host.returns_to(before)


@pytest.mark.parametrize("adopted", [False, True])
async def test_a_resolver_that_hangs_is_killed_and_started_again(
    host: Host, monkeypatch: pytest.MonkeyPatch, adopted: bool
) -> None:
    for name, value_s in {
        "FIRST_RETRY_S": 0.05,
        "QUIET_S": 0.05,
        "START_S": 0.05,
        "HANG_S": 2.0,
    }.items():
        monkeypatch.setattr(names_keeper, name, value_s)
    before = host.census()
    node, server = Node(host), MemoryServer()
    async with AsyncExitStack() as run:
        await run.enter_async_context(netd(node, server))
        web = await client(node, A, **WEB)
        await asyncio.sleep(0.5)  # it answers when it is asked
        (first,) = processes(host)
        if adopted:
            await run.aclose()
            monkeypatch.setattr(resolver_start, "HELLO_S", 2.0)
        os.kill(first, signal.SIGSTOP)
        if adopted:
            await run.enter_async_context(netd(node, server))
            assert node.doors.resolver.addresses == (IPv4Address(GATEWAY),)
        await eventually(lambda: bool(processes(host) - {first}))
        await eventually(lambda: asking() == {str(web.ip)})
        assert processes(host) == processes(host) - {first}
        assert await web.found("web.shop.vm.internal") == [str(web.ip)]
        await release(node)
    await host.returns_to(before)


async def test_a_resolver_whose_netd_died_before_its_first_word_ends(host: Host) -> None:
    before = host.census()
    node = Node(host)
    node.wire()
    channel = await launch(node.site_of_names.text())
    await eventually(lambda: bool(processes(host)))
    channel.close()
    await eventually(lambda: not processes(host))
    await host.returns_to(before)
