"""The hypervisor module, on libvirt's own test driver, which runs in this process."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import libvirt
import pytest

from virtbus.nodeagent.core.domain_xml import DomainInputs, render
from virtbus.nodeagent.core.ports import DomainChange, DomainEvent, DomainState, Ending
from virtbus.nodeagent.edge.hypervisor import LibvirtHypervisor
from virtbus.nodeagent.edge.libvirt_calls import STUCK_LIMIT, Threads
from virtbus.nodeagent.edge.libvirt_domains import state_of
from virtbus.nodeagent.edge.libvirt_errors import cause, translated
from virtbus.nodeagent.edge.libvirt_limits import parse_max_workers
from virtbus.nodeagent.edge.libvirt_links import LibvirtLinks
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.vm import VmRecord, VmSpec

HOST = "<node><cpu><mhz>2000</mhz><model>x86_64</model></cpu></node>\n"


def uid(number: int) -> str:
    return f"0192f0c1-2d3e-7abc-8def-{number:012x}"


def xml(number: int) -> str:
    record = VmRecord(
        uid=uid(number),
        namespace="default",
        name=f"vm{number}",
        spec=VmSpec(),
        spec_hash="0" * 64,
        node="n1",
        epoch=3,
        created_ns=1,
    )
    return render(
        DomainInputs(
            record=record,
            disks={},
            seeds={},
            console_socket=Path(f"/run/virtbus/vms/{record.uid}/console.sock"),
            console_log=Path(f"/var/lib/virtbus/consoles/{record.uid}.log"),
            accelerator="tcg",
            emulator="/usr/bin/qemu-system-x86_64",
        )
    )


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[LibvirtHypervisor]:
    async with LibvirtHypervisor(f"test://{_node(tmp_path)}", starts_at_once=4) as hypervisor:
        yield hypervisor


async def next_of(events: AsyncIterator[DomainEvent], change: DomainChange) -> DomainEvent:
    async with asyncio.timeout(10):
        async for event in events:
            if event.change is change:
                return event
    raise AssertionError(change)


async def test_a_domain_lives_from_define_to_undefine(host: LibvirtHypervisor) -> None:
    assert await host.facts(uid(1)) is None
    await host.define(xml(1))
    await host.define(xml(1))
    facts = await host.facts(uid(1))
    assert facts is not None
    assert facts.state is DomainState.SHUT_OFF
    assert facts.metadata is not None
    assert facts.metadata.epoch == 3

    await host.start(uid(1))
    await host.start(uid(1))
    assert [(d.uid, d.state) for d in await host.list_domains()] == [(uid(1), DomainState.RUNNING)]

    await host.suspend(uid(1))
    facts = await host.facts(uid(1))
    assert facts is not None
    assert facts.state is DomainState.PAUSED
    await host.resume(uid(1))

    await host.destroy(uid(1))
    await host.destroy(uid(1))
    facts = await host.facts(uid(1))
    assert facts is not None
    assert facts.ending is Ending.ENDED
    await host.undefine(uid(1))
    await host.undefine(uid(1))
    assert await host.list_domains() == []


async def test_events_of_a_life_arrive_in_order(host: LibvirtHypervisor) -> None:
    async with host.events() as events:
        await host.define(xml(2))
        await host.start(uid(2))
        assert (await next_of(events, DomainChange.STARTED)).uid == uid(2)
        await host.suspend(uid(2))
        await next_of(events, DomainChange.PAUSED)
        await host.resume(uid(2))
        await next_of(events, DomainChange.RESUMED)
        await host.destroy(uid(2))
        assert (await next_of(events, DomainChange.ENDED)).uid == uid(2)


async def test_a_missing_domain_is_an_error_for_a_start_but_not_for_an_end(
    host: LibvirtHypervisor,
) -> None:
    await host.destroy(uid(9))
    await host.undefine(uid(9))
    assert await host.shutdown(uid(9)) is False
    with pytest.raises(VirtbusError) as raised:
        await host.start(uid(9))
    assert raised.value.reason == "no_domain"


async def test_a_foreign_domain_is_neither_listed_nor_touched(host: LibvirtHypervisor) -> None:
    foreign = xml(5).replace(f"<name>vb-{uid(5)}</name>", "<name>vb-precious</name>")
    await host.define(foreign)
    assert await host.list_domains() == []
    await host.destroy(uid(5))
    await host.undefine(uid(5))
    with pytest.raises(VirtbusError):
        await host.define(xml(5))  # the UUID belongs to the foreign domain: it still exists


async def test_many_at_once_use_one_connection_of_the_test_driver(host: LibvirtHypervisor) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(50):
            group.create_task(host.define(xml(number)))
    async with asyncio.TaskGroup() as group:
        for number in range(50):
            group.create_task(host.start(uid(number)))
    running = await host.list_domains()
    assert len(running) == 50
    assert all(domain.active for domain in running)


async def test_a_missing_libvirt_is_reported_with_the_next_step(tmp_path: Path) -> None:
    uri = f"qemu+unix:///system?socket={tmp_path}/none"
    async with LibvirtHypervisor(uri, starts_at_once=4) as hypervisor, hypervisor.events():
        for _ in range(3):
            with pytest.raises(VirtbusError) as raised:
                await hypervisor.list_domains()
            assert raised.value.reason == "libvirt_down"
            assert raised.value.code == Code.UNAVAILABLE
            assert "start libvirtd" in str(raised.value)


async def test_a_hung_call_is_abandoned_and_others_continue() -> None:
    threads = Threads("test")
    release = threading.Event()
    settled: list[str] = []
    with pytest.raises(VirtbusError) as raised:
        await threads.call(
            release.wait,
            timeout_s=0.01,
            settled=lambda: settled.append("settled"),
            ended=lambda: settled.append("ended"),
        )
    assert raised.value.reason == "libvirt_stuck"
    assert threads.stuck == 1
    assert settled == ["settled"]
    assert await threads.call(lambda: 7, timeout_s=5) == 7
    release.set()
    async with asyncio.timeout(5):
        while threads.stuck:
            await threads.call(lambda: None, timeout_s=5)
    assert settled == ["settled", "ended"]
    threads.close()


async def test_a_cancelled_caller_leaves_the_call_to_end_by_itself() -> None:
    threads = Threads("test")
    release, ended = threading.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        caller = group.create_task(threads.call(release.wait, timeout_s=5, ended=ended.set))
        await asyncio.sleep(0)
        caller.cancel()
    release.set()
    async with asyncio.timeout(5):
        await ended.wait()
    threads.close()


async def test_too_many_stuck_calls_make_the_hypervisor_refuse(tmp_path: Path) -> None:
    release = threading.Event()
    threads = Threads("test")
    links = LibvirtLinks(f"test://{_node(tmp_path)}", threads, at_once=9, stuck_limit=STUCK_LIMIT)
    async with asyncio.TaskGroup() as group:
        for _ in range(STUCK_LIMIT):
            group.create_task(_stuck(threads, release))
    with pytest.raises(VirtbusError) as raised:
        await links.run(lambda connection: connection.getVersion(), "ask", timeout_s=5)
    assert raised.value.reason == "libvirt_stuck"
    release.set()
    async with asyncio.timeout(5):
        while threads.stuck:
            await asyncio.sleep(0)
    assert await links.run(lambda connection: connection.getVersion(), "ask", timeout_s=5)
    links.close()
    threads.close()


def _node(folder: Path) -> Path:
    node = folder / "node.xml"
    node.write_text(HOST)
    return node


async def _stuck(threads: Threads, release: threading.Event) -> None:
    with pytest.raises(VirtbusError):
        await threads.call(release.wait, timeout_s=0.01)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "internal error: process exited while connecting to monitor: "
            "netd_down: netd does not answer; see `virtbus status`",
            "netd_down: netd does not answer; see `virtbus status`",
        ),
        (
            "internal error: qemu unexpectedly closed the monitor: first\n"
            "2026-11-21T10:00:00.123456Z qemu-system-x86_64: -m: too much",
            "-m: too much",
        ),
        ("unsupported configuration: no", "no"),
        ("", "libvirt gave no reason"),
    ],
)
def test_the_cause_is_the_emulators_own_last_line(text: str, said: str) -> None:
    assert cause(text) == said


class Raised(libvirt.libvirtError):
    """An error of libvirt, as a call raises it."""

    def __init__(self, code: int, domain: int, message: str) -> None:
        super().__init__(message)
        self.err = (code, domain, message, 2, None, None, None, 0, 0)


def test_the_wrappers_line_gives_the_reason_and_whether_to_try_later() -> None:
    prefix = "internal error: process exited while connecting to monitor: "
    later = translated(
        Raised(libvirt.VIR_ERR_INTERNAL_ERROR, 10, f"{prefix}recovering: netd compares; wait"),
        "start the guest",
    )
    assert (later.code, later.reason) == (Code.UNAVAILABLE, "recovering")
    never = translated(
        Raised(libvirt.VIR_ERR_INTERNAL_ERROR, 10, f"{prefix}mac_mismatch: two MACs"), "start"
    )
    assert (never.code, never.reason) == (Code.INTERNAL, "mac_mismatch")


def test_a_missing_disk_is_not_mistaken_for_a_missing_libvirt() -> None:
    error = Raised(libvirt.VIR_ERR_SYSTEM_ERROR, 18, "Cannot access storage file '/x'")
    assert translated(error, "start the guest").reason == "libvirt_failed"


def test_a_domain_with_a_waiting_start_is_starting_not_paused() -> None:
    paused, starting = libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_STARTING_UP
    assert state_of(paused, starting) == (DomainState.STARTING, Ending.UNKNOWN)
    failed = state_of(libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_SHUTOFF_FAILED)
    assert failed == (DomainState.SHUT_OFF, Ending.UNKNOWN)


def test_virt_admins_table_gives_the_workers() -> None:
    assert parse_max_workers("minWorkers     : 5\nmaxWorkers     : 20\n") == 20
    assert parse_max_workers("error: no") is None
