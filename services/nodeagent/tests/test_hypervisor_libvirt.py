"""The hypervisor module on the real libvirtd, with guests of one boot sector."""

import asyncio
import os
import signal
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from services.nodeagent.tests.libvirt_host import (
    ECHOES,
    POWERS_OFF,
    QEMU,
    READS_FW_CFG,
    SLEEPS,
    Host,
    folder,
    heard,
    host,
    pid_of,
)

from virtbus.nodeagent.core.ports import DomainChange, DomainEvent, DomainState, Ending
from virtbus.nodeagent.edge.console import Consoles
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.ignition import Ignition
from virtbus.schemas.resources import NO_LIMITS, Resources, ResourcesInForce
from virtbus.schemas.vm import VmSpec

__all__ = ["folder", "host"]  # fixtures

pytestmark = pytest.mark.integration


async def test_a_guest_lives_from_define_to_undefine(host: Host) -> None:
    record = host.record()
    async with host.hypervisor.events() as events:
        await host.define(record)
        await host.hypervisor.start(record.uid)
        await host.hypervisor.start(record.uid)
        await heard(events, record.uid, DomainChange.STARTED)
        facts = await host.hypervisor.facts(record.uid)
        assert facts is not None
        assert facts.state is DomainState.RUNNING
        assert facts.metadata is not None
        assert facts.metadata.uid == record.uid
        await host.hypervisor.suspend(record.uid)
        await heard(events, record.uid, DomainChange.PAUSED)
        await host.hypervisor.resume(record.uid)
        await host.hypervisor.reset(record.uid)
        await host.hypervisor.destroy(record.uid)
        await host.hypervisor.destroy(record.uid)
        await heard(events, record.uid, DomainChange.ENDED)
        facts = await host.hypervisor.facts(record.uid)
        assert facts is not None
        assert facts.ending is Ending.ENDED
        await host.hypervisor.undefine(record.uid)
        assert await host.hypervisor.facts(record.uid) is None


async def test_a_guest_that_sleeps_is_paused_until_it_is_resumed(host: Host) -> None:
    record = host.record()
    async with host.hypervisor.events() as events:
        await host.define(record, SLEEPS)
        await host.hypervisor.start(record.uid)
        await heard(events, record.uid, DomainChange.STARTED)
        await heard(events, record.uid, DomainChange.PAUSED)
        await host.hypervisor.suspend(record.uid)
        facts = await host.hypervisor.facts(record.uid)
        assert facts is not None
        assert facts.state is DomainState.PAUSED
        await host.hypervisor.resume(record.uid)
        await heard(events, record.uid, DomainChange.STARTED)


def io_cpus(uid: str) -> set[str]:
    """Return the CPUs that the kernel gives to the IO threads of a guest."""
    tasks = Path(f"/proc/{pid_of(uid)}/task").iterdir()
    threads = [task for task in tasks if (task / "comm").read_text().startswith("IO iothread")]
    lines = [line for task in threads for line in (task / "status").read_text().splitlines()]
    return {line.split()[1] for line in lines if line.startswith("Cpus_allowed_list:")}


async def test_limits_on_the_host_change_under_a_running_guest(host: Host) -> None:
    spec = host.spec().model_dump()
    spec["domain"]["devices"]["disks"][0]["dedicated_io_thread"] = True
    record = host.record(VmSpec.model_validate(spec))
    await host.define(record)
    hypervisor, uid = host.hypervisor, record.uid
    wanted = Resources(cpu_shares=300, cpu_quota_us=50_000, cpu_period_us=50_000, cpus="0")
    assert await hypervisor.set_resources(uid, wanted) == (None, None), "no guest runs"
    await hypervisor.start(uid)
    plain = await hypervisor.set_resources(uid, NO_LIMITS)
    for limits in (wanted, wanted, wanted.model_copy(update={"cpu_period_us": 10_000})):
        found = await hypervisor.set_resources(uid, limits)
        assert found == (ResourcesInForce(**limits.model_dump()), None)
    assert io_cpus(uid) == {"0"}
    less, _ = await hypervisor.set_resources(uid, Resources(memory_bytes=2**24))
    assert less is not None
    assert less.memory_bytes == 2**25, "a guest without a driver keeps its memory"
    assert await hypervisor.set_resources(uid, NO_LIMITS) == plain
    found = await hypervisor.set_resources(uid, wanted.model_copy(update={"cpus": "4000"}))
    assert "4000" in str(found.error)
    assert found.in_force is not None
    assert found.in_force.cpu_shares == 300, "the other limits are set"


async def test_a_guest_that_powers_off_is_distinguished_from_a_killed_one(host: Host) -> None:
    async with host.hypervisor.events() as events:
        off = host.record()
        await host.define(off, POWERS_OFF)
        await host.hypervisor.start(off.uid)
        await heard(events, off.uid, DomainChange.SHUT_DOWN)
        facts = await host.hypervisor.facts(off.uid)
        assert facts is not None
        assert facts.ending is Ending.SHUT_DOWN

        killed = host.record()
        await host.define(killed)
        await host.hypervisor.start(killed.uid)
        os.kill(pid_of(killed.uid), 9)
        await heard(events, killed.uid, DomainChange.CRASHED)
        facts = await host.hypervisor.facts(killed.uid)
        assert facts is not None
        assert facts.ending is Ending.CRASHED


async def test_a_failing_emulator_shows_its_own_line_and_reason(host: Host) -> None:
    wrapper = host.folder / "wrapper"
    wrapper.write_text(
        "#!/bin/sh\n"
        'case "$*" in *vb-*) echo "recovering: netd compares; tried again" >&2; exit 1;; esac\n'
        f'exec {QEMU} "$@"\n'
    )
    wrapper.chmod(0o755)
    record = host.record()
    await host.define(record, emulator=str(wrapper))
    reason, message = "emulator_ended", ""
    while reason == "emulator_ended":  # libvirt was too late for the emulator's message
        with pytest.raises(VirtbusError) as raised:
            await host.hypervisor.start(record.uid)
        assert raised.value.code == Code.UNAVAILABLE
        reason, message = raised.value.reason, str(raised.value)
    assert (reason, "netd compares" in message) == ("recovering", True)
    facts = await host.hypervisor.facts(record.uid)
    assert facts is not None
    assert (facts.state, facts.ending) == (DomainState.SHUT_OFF, Ending.UNKNOWN)


async def test_a_start_that_waits_is_seen_as_starting_and_can_be_ended(host: Host) -> None:
    wrapper = host.folder / "wrapper"
    wrapper.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *vb-*) : > {host.folder}/waits; exec sleep 60;; esac\n'
        f'exec {QEMU} "$@"\n'
    )
    wrapper.chmod(0o755)
    host.folder.chmod(0o777)
    record = host.record()
    await host.define(record, emulator=str(wrapper))
    async with asyncio.TaskGroup() as group:
        start = group.create_task(_start_refused(host, record.uid))
        async with asyncio.timeout(30):
            while not (host.folder / "waits").exists():
                await asyncio.sleep(0.01)
            facts = await host.hypervisor.facts(record.uid)
            assert facts is not None
            assert facts.starting
            await host.hypervisor.destroy(record.uid)
            await start


async def _start_refused(host: Host, uid: str) -> None:
    with pytest.raises(VirtbusError):
        await host.hypervisor.start(uid)


async def test_the_console_accepts_keys_and_the_log_keeps_the_output(host: Host) -> None:
    record = host.record()
    await host.define(record, ECHOES)
    await host.hypervisor.start(record.uid)
    consoles = Consoles(host.files.console_socket, host.files.console_log)
    async with asyncio.timeout(30):
        async with consoles.attach(record.uid) as first:
            async with consoles.attach(record.uid) as second:
                await second.write(b"hello")
                assert await _until(second.output(), b"hello")
                assert await _until(first.output(), b"hello")
            while "hello" not in await _log(consoles, record.uid):
                await asyncio.sleep(0.01)
        async with consoles.attach(record.uid) as third:
            await host.hypervisor.destroy(record.uid)
            assert [data async for data in third.output()] == []
            assert third.closed == "the guest stopped"
    mode = stat.S_IMODE(host.files.console_log(record.uid).stat().st_mode)
    assert mode & 0o077 == 0
    with pytest.raises(VirtbusError) as raised:
        async with consoles.attach(record.uid):
            pass
    assert raised.value.reason == "no_console"


async def test_a_guest_reads_ignitions_configuration_and_nobody_else_does(host: Host) -> None:
    config = '{"ignition": {"version": "3.4.0"}, "a": "CANARY"}'
    record = host.record(host.spec().model_copy(update={"ignition": Ignition(config=config)}))
    await host.define(record, READS_FW_CFG)
    await host.hypervisor.start(record.uid)
    log = host.files.console_log(record.uid)
    async with asyncio.timeout(30):
        while config[:48].encode() not in log.read_bytes():
            await asyncio.sleep(0.01)
    path = host.files.vms / record.uid / "seed-ignition.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (argv,) = (
        found.read_bytes()
        for found in Path("/proc").glob("[0-9]*/cmdline")
        if f"guest=vb-{record.uid}".encode() in _read(found)
    )
    assert str(path).encode() in argv
    assert b"CANARY" not in argv


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process ended
        return b""


async def _until(output: AsyncIterator[bytes | str], wanted: bytes) -> bool:
    seen = b""
    async for data in output:
        seen += data if isinstance(data, bytes) else b""
        if wanted in seen:
            return True
    return False


async def _log(consoles: Consoles, uid: str) -> str:
    chunks = [c async for c in consoles.read_log(uid, tail_bytes=4096, follow=False)]
    return b"".join(chunks).decode()


async def test_a_lost_connection_is_made_again_and_events_with_it(host: Host) -> None:
    """The daemon is shared, so a test simulates its death by closing our sockets to it."""
    record = host.record()
    await host.define(record)
    async with host.hypervisor.events() as events:
        assert await host.hypervisor.list_domains() is not None
        _cut_connections()
        async with asyncio.timeout(30):
            while await anext(aiter(events)) != DomainEvent("", None):
                pass  # an event of a foreign domain
        async with asyncio.timeout(30):
            while True:
                try:
                    await host.hypervisor.start(record.uid)
                except VirtbusError as error:
                    assert error.reason == "libvirt_down"  # noqa: PT017
                    await asyncio.sleep(0.05)
                else:
                    break
        await heard(events, record.uid, DomainChange.STARTED)


def _cut_connections() -> None:
    """Shut down every UNIX socket of this process that leads to libvirtd."""
    for name in os.listdir("/proc/self/fd"):
        try:
            peer = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with peer:
            try:
                address = peer.getpeername()
            except OSError:
                continue
            if isinstance(address, str) and "libvirt" in address:
                peer.shutdown(socket.SHUT_RDWR)


async def test_a_hung_qemu_delays_no_other_call_and_can_be_ended(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("virtbus.nodeagent.edge.hypervisor.MONITOR_TIMEOUT_S", 3.0)
    hung, well = host.record(), host.record()
    for record in (hung, well):
        await host.define(record)
        await host.hypervisor.start(record.uid)
    os.kill(pid_of(hung.uid), signal.SIGSTOP)
    with pytest.raises(VirtbusError) as raised:
        await host.hypervisor.shutdown(hung.uid)
    assert raised.value.reason == "libvirt_stuck"
    assert host.hypervisor.healthy
    async with asyncio.timeout(10):
        assert {d.uid for d in await host.hypervisor.list_domains()} >= {hung.uid, well.uid}
        assert await host.hypervisor.shutdown(well.uid) is True
        await host.hypervisor.destroy(well.uid)
    await host.hypervisor.destroy(hung.uid)
    facts = await host.hypervisor.facts(hung.uid)
    assert facts is not None
    assert not facts.active


async def test_a_guest_without_an_agent_is_not_frozen(host: Host) -> None:
    record = host.record()
    await host.define(record)
    guests = host.hypervisor.guests
    assert not await guests.freeze(record.uid, timeout_s=5), "it is off"
    await host.hypervisor.start(record.uid)
    for act in (guests.freeze, guests.thaw):
        with pytest.raises(VirtbusError) as caught:
            await act(record.uid, timeout_s=5)
        assert caught.value.reason == "guest_agent_absent"
    await host.hypervisor.suspend(record.uid)
    with pytest.raises(VirtbusError) as caught:
        await guests.thaw(record.uid, timeout_s=5)
    assert caught.value.reason in {"guest_agent_absent", "domain_state"}


async def test_a_qemu_that_libvirt_does_not_know_is_found_and_ended_only_by_force(
    host: Host,
) -> None:
    record, other = host.record(), host.record()
    await host.define(record)
    arguments = ("-machine", "none", "-display", "none", "-S", "-uuid", record.uid)
    qemu = await asyncio.create_subprocess_exec(
        QEMU, "-name", f"guest=vb-{record.uid},debug-threads=on", *arguments
    )

    async def found() -> list[DomainState]:
        return [one.state for one in await host.hypervisor.list_domains() if one.uid == record.uid]

    try:
        async with asyncio.timeout(30):
            while await found() != [DomainState.LOST]:
                await asyncio.sleep(0.05)
        facts = await host.hypervisor.facts(record.uid)
        assert facts is not None
        assert (facts.active, facts.pid) == (True, qemu.pid)
        for call in (host.hypervisor.start, host.hypervisor.shutdown, host.hypervisor.destroy):
            with pytest.raises(VirtbusError) as refused:
                await call(record.uid)
            assert refused.value.reason == "guest_lost"
        await host.hypervisor.destroy(other.uid, forced=True)
        assert qemu.returncode is None
        await host.hypervisor.destroy(record.uid, forced=True)
        assert await qemu.wait() == -signal.SIGKILL
        assert await found() == [DomainState.SHUT_OFF]
        await host.hypervisor.start(record.uid)
        assert await found() == [DomainState.RUNNING]
    finally:
        if qemu.returncode is None:
            qemu.kill()
