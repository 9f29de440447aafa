"""Starts a guest, or waits for a start in progress; then waits until the guest is ready."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from virtbus.bus.client import tracing
from virtbus.bus.runtime.backoff import delays
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.addresses import Addresses
from virtbus.nodeagent.core.domain_xml import DomainInputs, domain_name, render
from virtbus.nodeagent.core.logins import logins_of
from virtbus.nodeagent.core.nics import nic_devices
from virtbus.nodeagent.core.ports import DomainFacts
from virtbus.nodeagent.core.servers.port import Login
from virtbus.nodeagent.vm.dependencies import Dependency
from virtbus.nodeagent.vm.machine import MachineEvent
from virtbus.nodeagent.vm.observation import FOUND
from virtbus.nodeagent.vm.operations.outcome import RETRY_S, Outcome
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.node_rpc import Arm, ArmNic, ImageReady, NetReady
from virtbus.schemas.vm import VmRecord

log = logging.getLogger(__name__)

ADOPT_LIMIT_S = 60.0


class Machine(NamedTuple):
    """The parts of a domain that do not follow from the record."""

    accelerator: str
    kept: Addresses
    """The addresses of devices in the last run."""


async def start(
    record: VmRecord,
    image: Dependency[ImageReady],
    net: Dependency[NetReady],
    tools: AgentPorts,
    *,
    machine: Machine,
    paused: Callable[[], bool],
) -> Outcome:
    """Define the domain, tell netd to expect vmwrapper (`_arm`), and start the domain.

    Return "started" or "paused"; on failure "start failed" or "start later", with the error.
    `paused` is called just before the guest runs, and returns True if the record requests a pause.
    """
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    with tracing.span("virtbus start domain", uid=record.uid, parent=record.traceparent):
        try:
            logins = await _define(record, image, tools, machine)
            await _arm(record, net, tools)
            await tools.files.new_boot(record.uid)
            with tracing.span("libvirt create", uid=record.uid):
                async with tools.logins.lent(logins), tools.shares.disks(record) as files:
                    still = paused()
                    await _create(record, tools, paused=still, files=files)
        except VirtbusError as error:
            later = error.code == Code.UNAVAILABLE
            event: MachineEvent = "start later" if later else "start failed"
            return Outcome(event, error, kind=EventKind.DOMAIN_FAILED)
    took_ms = round((loop.time() - begun_s) * 1000, 1)
    tools.events.emit(EventKind.DOMAIN_STARTED, record, took_ms=took_ms)
    return Outcome("paused" if still else "started")


async def _define(
    record: VmRecord,
    image: Dependency[ImageReady],
    tools: AgentPorts,
    machine: Machine,
) -> list[Login]:
    """Define the domain from the record; return the logins of its disks; raises VirtbusError."""
    made = image.latest
    if made is None:
        raise VirtbusError(
            Code.UNAVAILABLE, "no_image", "the disks are not ready; the agent retries"
        )
    disks = await tools.disks.sources(record, made.disks)
    shares = await tools.shares.prepare(record)
    with tracing.span("libvirt define", uid=record.uid):
        await tools.hypervisor.define(
            render(
                DomainInputs(
                    record=record,
                    disks=disks,
                    seeds=tools.seeds.paths(record),
                    shares=shares,
                    ignition=tools.seeds.ignition_path(record),
                    console_socket=tools.files.console_socket(record.uid),
                    console_log=tools.files.console_log(record.uid),
                    accelerator=machine.accelerator,
                    kept=machine.kept,
                    emulator=str(tools.settings.wrapper),
                    skip_cpu_queries=tools.settings.fast_start,
                )
            )
        )
    tools.events.emit(EventKind.DOMAIN_DEFINED, record)
    return logins_of(disks)


async def _create(
    record: VmRecord, tools: AgentPorts, *, paused: bool, files: Mapping[str, int]
) -> None:
    """Start the domain; raises VirtbusError, which names a directory that was refused."""
    try:
        await tools.hypervisor.start(record.uid, paused=paused, files=files)
    except VirtbusError as failure:
        raise await tools.shares.explained(record, failure) from None


async def _arm(record: VmRecord, net: Dependency[NetReady], tools: AgentPorts) -> None:
    """Let vmwrapper fetch the VM's tap descriptors from netd, once; raises VirtbusError.

    vmwrapper asks netd even for a VM without interfaces, because only netd knows the VM's network.
    """
    wanted = record.spec.domain.devices.interfaces
    made = net.latest
    if made is None:
        message = "the network is not ready; the agent retries"
        raise VirtbusError(Code.UNAVAILABLE, "no_network", message)
    if [one.name for one in made.interfaces] != [nic.name for nic in wanted]:
        message = "netd still has the interfaces of the last run; tried again"
        raise VirtbusError(Code.UNAVAILABLE, "network_changes", message)
    devices = nic_devices(wanted, made.interfaces)
    nics = tuple(
        ArmNic(device=device, mac=interface.mac)
        for device, interface in zip(devices, made.interfaces, strict=True)
    )
    await tools.netd.arm(
        Arm(
            uid=record.uid,
            epoch=record.epoch,
            domain_name=domain_name(record.uid),
            nics=nics,
            traceparent=tracing.current_traceparent(),
        )
    )


async def await_start(uid: str, tools: AgentPorts) -> MachineEvent:
    """Wait for a start that an earlier agent began; return "started", "paused" or "start later"."""
    loop = asyncio.get_running_loop()
    limit_s = loop.time() + ADOPT_LIMIT_S
    while loop.time() < limit_s:
        facts = await verify_running(uid, tools)
        if facts is None or not facts.starting:
            came = FOUND[facts.state] if facts is not None and facts.active else None
            return came or "start later"
        await asyncio.sleep(RETRY_S[0])
    return "start later"


async def verify_running(uid: str, tools: AgentPorts) -> DomainFacts | None:
    """Return the facts of the VM's domain, None if it has none; retry failed reads."""
    for delay_s in delays(*RETRY_S, tools.bus.sources):
        try:
            return await tools.hypervisor.facts(uid)
        except VirtbusError as error:
            extra = {"code": error.reason, "uid": uid}
            log.info("check failed, will be retried: %s", error, extra=extra)
            await asyncio.sleep(delay_s)
    return None


async def learn_dependencies(
    record: VmRecord, image: Dependency[ImageReady], net: Dependency[NetReady]
) -> VirtbusError | None:
    """Request an adopted guest's network and disks. netd then also restores DHCP.

    Return the error if the network or a disk is missing, otherwise None.
    """
    try:
        await net.get(record, ask_after_s=0.0)
        await image.get(record, ask_after_s=0.0)
    except VirtbusError as error:
        extra = {"code": error.reason, "uid": record.uid}
        log.warning("adopted with missing resources: %s", error, extra=extra)
        return error
    return None


async def await_ready(
    record: VmRecord, net: Dependency[NetReady], tools: AgentPorts, *, rebooted: bool
) -> str:
    """Wait until the guest is ready; return the sign of readiness, such as `AddressAnswers`."""
    with tracing.span("virtbus await guest", uid=record.uid, parent=record.traceparent):
        return await tools.reach.answers(
            record.uid,
            lambda: net.latest.interfaces if net.latest else (),
            rebooted=rebooted,
        )
