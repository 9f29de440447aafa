"""The service on a bus: records in, ready events and events out, the repair path, its sockets."""

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from services.netd.tests.pretended_host import Host, eventually, make_record

from virtbus.bus.client import service_report
from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.errors import BusError
from virtbus.netd import service
from virtbus.netd.__main__ import host_ports
from virtbus.netd.attachments import Attachments
from virtbus.netd.builder import Builder
from virtbus.netd.core.names import netns
from virtbus.netd.host_networks import HostNetworks
from virtbus.netd.service import Netd, teardown
from virtbus.netd.settings import Settings
from virtbus.schemas import subjects
from virtbus.schemas.envelope import open_envelope
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.events import Event, EventKind
from virtbus.schemas.network import NetworkState
from virtbus.schemas.node import HostAddresses, NodeState
from virtbus.schemas.node_rpc import (
    ANY_EPOCH,
    Ensure,
    Inspect,
    NetPhase,
    NetReady,
    Release,
    ServiceReport,
)
from virtbus.schemas.security_group import NodeGroup
from virtbus.schemas.vm import JoinNonce, RunStrategy, VmRecord
from virtbus.schemas.wire import encode, validate

pytestmark = pytest.mark.integration

NODE = "n1"
A = "0192f0c1-2d3e-7abc-8def-00000000000a"
B = "0192f0c1-2d3e-7abc-8def-00000000000b"


def settings_on(host: Host) -> Settings:
    emulator = host.tmp / "qemu"
    emulator.touch(mode=0o755)
    return Settings(
        node=NODE,
        state_dir=host.tmp / "state",
        run_dir=host.tmp / "run",
        netns_dir=host.tmp / "netns",
        cni_conf_dir=host.tmp / "cni",
        wrapper_dir=host.tmp / "libexec",
        emulator=emulator,
        bridge_linger_s=0,
    )


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_report, "INTERVAL_S", 0.05)
    monkeypatch.setattr(service, "COMPILER", None)


class Desk:
    """A client's side of the bus, with netd's messages so far."""

    def __init__(self, bus: MemoryBus, settings: Settings) -> None:
        self.bus = bus
        self.settings = settings
        self.told: asyncio.Queue[NetReady] = asyncio.Queue()
        self.teles: list[ServiceReport] = []

    async def put(self, record: VmRecord) -> None:
        await self.bus.put(subjects.vm_record(NODE, record.uid), encode(record))

    async def ask(self, verb: str, value: Any) -> Any:
        return await self.bus.request(subjects.rpc(NODE, "netd", verb), value, timeout_s=10)

    async def ready(self, uid: str = A) -> NetReady:
        async with asyncio.timeout(10):
            while True:
                told = await self.told.get()
                if told.uid == uid:
                    return told

    async def kinds(self, uid: str = A) -> list[str]:
        stored = await self.bus.history(subjects.events(uid))
        return [Event.model_validate(open_envelope(message.body).data).kind for message in stored]


async def netd_on(bus: MemoryBus, settings: Settings) -> None:
    """Run a netd whose agent holds the node."""
    networks = HostNetworks(settings, host_ports(settings), lambda: "")
    async with networks.running():
        await Netd(bus, networks).run()


@contextlib.asynccontextmanager
async def serving(host: Host, server: MemoryServer) -> AsyncIterator[Desk]:
    desk = Desk(MemoryBus(server, "desk"), settings_on(host))
    async with (
        desk.bus.subscribe(subjects.ready_all(NODE)) as messages,
        desk.bus.subscribe(subjects.service_report(NODE, "netd")) as teles,
        asyncio.TaskGroup() as group,
    ):

        async def hear() -> None:
            async for message in messages:
                desk.told.put_nowait(NetReady.model_validate(open_envelope(message.body).data))

        async def listen() -> None:
            async for message in teles:
                desk.teles.append(ServiceReport.model_validate(open_envelope(message.body).data))

        tasks = [
            group.create_task(hear()),
            group.create_task(listen()),
            group.create_task(netd_on(MemoryBus(server, "netd"), desk.settings)),
        ]
        await eventually(lambda: bool(desk.teles) and desk.teles[-1].state.state is NodeState.READY)
        try:
            yield desk
        finally:
            for task in tasks:
                task.cancel()


async def test_a_request_during_the_comparison_is_refused_without_a_failure_event(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A VM that is created directly after netd's start waits; nothing of it has failed."""
    compare, original = asyncio.Event(), Attachments.recover

    async def slow(attachments: Attachments) -> None:
        await compare.wait()
        await original(attachments)

    monkeypatch.setattr(Attachments, "recover", slow)
    server, record = MemoryServer(), make_record(A)
    refused: list[VirtbusError] = []

    async def early() -> None:
        desk = Desk(MemoryBus(server, "early"), settings_on(host))
        await eventually(lambda: bool(server.subscribed))
        while not refused:
            try:
                await desk.ask("ensure", Ensure(record=record))
            except VirtbusError as error:
                refused.append(error)
            except BusError:
                await asyncio.sleep(0.01)  # it does not listen yet
        assert await desk.kinds() == []
        compare.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(early())
        async with serving(host, server) as desk:
            await desk.put(record)
            await desk.ask("ensure", Ensure(record=record))
            assert EventKind.NETWORK_FAILED not in await desk.kinds()
    assert refused[0].reason == "recovering"
    await teardown(desk.settings, host_ports(desk.settings))


@pytest.fixture
async def desk(host: Host) -> AsyncIterator[Desk]:
    before = host.census()
    async with serving(host, MemoryServer()) as made:
        yield made
    await teardown(made.settings, host_ports(made.settings))
    await eventually(lambda: host.census() == before)


async def test_a_record_becomes_a_network_and_a_ready_event(desk: Desk) -> None:
    await desk.put(make_record(A))
    ready = await desk.ready()
    assert (ready.phase, ready.epoch, ready.generation) == (NetPhase.READY, 1, 1)
    assert ready.interfaces[0].network == "default"
    await eventually_kinds(desk, [EventKind.NETWORK_READY])


async def eventually_kinds(desk: Desk, wanted: list[EventKind]) -> None:
    async with asyncio.timeout(5):
        while await desk.kinds() != wanted:
            await asyncio.sleep(0.01)


async def test_ensure_and_release_by_request_are_repeatable(desk: Desk) -> None:
    await desk.put(make_record(A))
    for _time in range(2):
        answer = NetReady.model_validate(await desk.ask("ensure", Ensure(record=make_record(A))))
        assert answer.phase is NetPhase.READY
    held = await desk.ask("inspect", Inspect(uid=A))
    assert f"netns vb-{A}" in held["things"][A]
    for _time in range(2):
        assert await desk.ask("release", Release(uid=A, epoch=1)) == {"uid": A}
    assert (await desk.ask("inspect", Inspect())).get("things", {}) == {}
    await eventually_kinds(desk, [EventKind.NETWORK_READY, EventKind.NETWORK_RELEASED])


async def test_an_audit_removes_nothing_that_belongs_to_a_record(desk: Desk) -> None:
    await desk.put(make_record(A))
    assert (await desk.ready()).phase is NetPhase.READY
    with pytest.raises(VirtbusError) as caught:
        await desk.ask("release", Release(uid=A, epoch=ANY_EPOCH))
    assert caught.value.reason == "record_stands"
    assert A in (await desk.ask("inspect", Inspect()))["things"]


async def test_a_vm_whose_record_the_bus_has_only_in_an_older_epoch_gets_its_network(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bus was restored from a backup, and the agent keeps the newer record in force."""
    monkeypatch.setattr(service, "CATCH_UP_S", 0.2)
    await desk.put(make_record(A))
    wanted = Ensure(record=make_record(A, epoch=2))
    with pytest.raises(VirtbusError, match="lists all records again"):
        await desk.ask("ensure", wanted)
    answer = NetReady.model_validate(await desk.ask("ensure", wanted))
    assert (answer.phase, answer.epoch) == (NetPhase.READY, 2)
    await desk.put(make_record(A))  # as a periodic list delivers it again
    await desk.put(make_record(B))
    await desk.ready(B)
    assert EventKind.NETWORK_FAILED not in await desk.kinds()


@pytest.mark.parametrize("verb", ["release", "inspect"])
async def test_an_invalid_uid_is_refused_with_its_path(desk: Desk, verb: str) -> None:
    with pytest.raises(VirtbusError, match="uid: must be a UUID") as refused:
        await desk.ask(verb, {"uid": "../etc", "epoch": 1})
    assert refused.value.code == 400


async def test_a_record_that_is_deleting_or_gone_removes_nothing(desk: Desk) -> None:
    await desk.put(make_record(A))
    await desk.ready()
    await desk.put(make_record(A, deleting=True, generation=2))
    await desk.bus.purge(subjects.vm_record(NODE, A))
    await desk.put(make_record(B))
    await desk.ready(B)
    assert A in (await desk.ask("inspect", Inspect()))["things"]


async def test_a_halted_vm_gets_no_network_until_it_is_wanted(desk: Desk) -> None:
    halted = make_record(A)
    spec = halted.spec.model_copy(update={"run_strategy": RunStrategy.HALTED})
    await desk.put(halted.model_copy(update={"spec": spec}))
    await desk.put(make_record(B))
    await desk.ready(B)
    assert A not in (await desk.ask("inspect", Inspect()))["things"]
    await desk.put(make_record(A, generation=2))
    assert (await desk.ready()).generation == 2


async def test_hosts_that_come_and_go_are_closed_to_guests(desk: Desk) -> None:
    await desk.put(make_record(A))
    await desk.ready()

    def closed() -> set[str]:
        listed = subprocess.run(
            ["nft", "-j", "list", "table", "inet", "virtbus"],
            capture_output=True,
            check=True,
        )
        parts = json.loads(listed.stdout)["nftables"]
        sets = [part["set"] for part in parts if "set" in part]
        return {address for hosts in sets for address in hosts.get("elem", ())}

    for fleet in (("198.51.100.7", "2001:db8::7"), ("198.51.100.7", "198.51.100.8"), ()):
        record = HostAddresses(node=NODE, fleet=(*fleet, "127.0.0.1", "10.127.0.1", "rubbish"))
        await desk.bus.put(subjects.node_hosts(NODE), encode(record))
        async with asyncio.timeout(10):
            while closed() != set(fleet):
                await asyncio.sleep(0.05)
    await desk.bus.put(subjects.node_hosts(NODE), b"rubbish")
    await desk.put(make_record(B))
    await desk.ready(B)


async def test_the_hosts_own_addresses_are_reported_without_the_guests_bridge(desk: Desk) -> None:
    subprocess.run(["ip", "addr", "add", "198.51.100.1/32", "dev", "lo"], check=True)
    subprocess.run(["ip", "addr", "add", "2001:db8::1/128", "dev", "lo"], check=True)
    await desk.put(make_record(A))
    await desk.ready()
    await eventually(lambda: desk.teles[-1].addresses == ("198.51.100.1", "2001:db8::1"))


async def test_an_impossible_network_is_reported_with_its_reason(desk: Desk) -> None:
    await desk.put(make_record(A, networks=("nowhere",)))
    told = await desk.ready()
    assert told.phase is NetPhase.FAILED
    assert told.error is not None
    assert told.error.reason == "network_unknown"
    with pytest.raises(VirtbusError, match="no network 'nowhere'"):
        await desk.ask("ensure", Ensure(record=make_record(A, networks=("nowhere",))))
    await desk.put(make_record(A, generation=2))
    async with asyncio.timeout(5):
        while (await desk.ready()).phase is not NetPhase.READY:
            pass


async def test_a_record_whose_groups_may_be_on_their_way_gets_no_network_yet(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "CATCH_UP_S", 0.05)
    await desk.put(make_record(A))
    await desk.ready()
    with pytest.raises(VirtbusError, match="has not received this record"):
        await desk.ask("ensure", Ensure(record=make_record(A, generation=2)))
    with pytest.raises(VirtbusError, match="has not received this record"):
        await desk.ask("ensure", Ensure(record=make_record(B)))


async def test_a_late_agent_undoes_no_change(desk: Desk) -> None:
    await desk.put(make_record(A, generation=2))
    await desk.ready()
    answer = NetReady.model_validate(await desk.ask("ensure", Ensure(record=make_record(A))))
    assert answer.generation == 2


async def test_an_unreadable_record_stops_no_other_vm(desk: Desk) -> None:
    await desk.bus.put(subjects.vm_record(NODE, B), b"\x81\xa3uid\xc1")
    await desk.put(make_record(A))
    assert (await desk.ready()).phase is NetPhase.READY


async def test_the_network_of_a_record_that_becomes_unreadable_is_not_left_over(desk: Desk) -> None:
    await desk.put(make_record(A))
    assert (await desk.ready()).phase is NetPhase.READY
    await desk.bus.put(subjects.vm_record(NODE, A), b"\xc1 no msgpack")
    await desk.put(make_record(B))
    await desk.ready(B)
    with pytest.raises(VirtbusError) as caught:
        await desk.ask("release", Release(uid=A, epoch=ANY_EPOCH))
    assert caught.value.reason == "record_stands"
    assert A in (await desk.ask("inspect", Inspect()))["things"]


async def test_the_wrapper_and_the_sockets_are_there(desk: Desk) -> None:
    assert (desk.settings.wrapper_dir / "vmwrapper").stat().st_mode & 0o777 == 0o755
    assert (desk.settings.run_dir / "netd" / "wrapper.sock").is_socket()
    assert [network.name for network in desk.teles[-1].networks] == ["default"]


async def test_networks_survive_the_service_and_are_reported_again(host: Host) -> None:
    server = MemoryServer()
    async with serving(host, server) as desk:
        await desk.put(make_record(A))
        first = await desk.ready()
    assert host.census()["netns"] == [f"vb-{A}"]
    async with serving(host, server) as desk:
        assert await desk.ready() == first
        assert Path("/proc/sys/net/ipv4/ip_forward").read_text() == "1\n"
    await teardown(settings_on(host), host_ports(settings_on(host)))
    assert host.census()["netns"] == []


async def test_groups_of_the_bus_apply_to_running_guests_and_outlive_the_service(
    host: Host,
) -> None:
    server = MemoryServer()
    key = subjects.node_group(NODE, "default", "web")
    spec = {"selector": {"labels": {"app": "web"}}, "isolates": ["ingress"]}
    group = validate(NodeGroup, {"uid": B, "namespace": "default", "name": "web", "spec": spec})

    def closed() -> bool:
        command = ["nsenter", f"--net={host.namespaces.path(netns(A))}", "nft", "list", "tables"]
        return b"virtbus_groups" in subprocess.run(command, capture_output=True).stdout

    async with serving(host, server) as desk:
        await desk.bus.put(subjects.join_nonce(NODE), encode(JoinNonce(nonce="n")))
        await desk.put(make_record(A, labels={"app": "web"}))
        await desk.ready()
        assert not closed()
        await desk.bus.put(key, encode(group))
        await eventually(closed)
    assert closed()
    async with serving(host, server) as desk:
        await eventually(lambda: bool(desk.teles) and desk.teles[-1].state.state is NodeState.READY)
        assert closed()
        await desk.bus.purge(key, marker_ttl_s=60.0)
        await eventually(lambda: not closed())
        await desk.ask("release", Release(uid=A, epoch=1))


def with_network(state: str, generation: int) -> VmRecord:
    record = make_record(A, generation=generation, powered=False)
    spec = record.spec.model_copy(update={"network_state": NetworkState(state)})
    return record.model_copy(update={"spec": spec})


async def test_the_network_of_a_vm_that_is_off_is_held_and_released(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await desk.put(with_network("Held", 1))
    assert len((await desk.ready()).interfaces) == 1
    runs = True
    monkeypatch.setattr(Builder, "runs", AsyncMock(side_effect=lambda _uid: runs))
    await desk.put(with_network("Released", 2))
    refused = await desk.ready()
    assert refused.error is not None
    assert (refused.generation, refused.error.reason) == (2, "network_used")
    assert A in (await desk.ask("inspect", Inspect()))["things"]
    runs = False
    while (released := await desk.ready()).error is not None:
        pass
    assert (released.generation, released.error, released.interfaces) == (2, None, ())
    assert A not in (await desk.ask("inspect", Inspect())).get("things", {})
    for _time in range(2):
        answer = await desk.ask("ensure", Ensure(record=with_network("Released", 2)))
        assert NetReady.model_validate(answer).interfaces == ()
    await desk.put(with_network("Held", 3))
    while (held := await desk.ready()).generation < 3:
        pass
    assert len(held.interfaces) == 1
    kinds = await desk.kinds()
    assert kinds[:2] == [EventKind.NETWORK_READY, EventKind.NETWORK_FAILED]
    assert kinds[-2:] == [EventKind.NETWORK_RELEASED, EventKind.NETWORK_READY]
