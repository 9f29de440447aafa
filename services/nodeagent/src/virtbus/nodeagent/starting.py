"""The steps before a guest's start: defines its domain, and arms netd for its wrapper."""

from typing import TYPE_CHECKING

from virtbus.bus import tracing
from virtbus.nodeagent.core.domain_xml import DomainInputs, domain_name, render
from virtbus.nodeagent.core.slots import nic_devices
from virtbus.nodeagent.tools import Tools
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import Kind
from virtbus.schemas.nodework import Arm, ArmNic
from virtbus.schemas.vm import VmRecord

if TYPE_CHECKING:
    from virtbus.nodeagent.guest import Guest


def has_nics(record: VmRecord) -> bool:
    """Return True for a VM that needs netd."""
    return bool(record.spec.domain.devices.interfaces)


async def define(record: VmRecord, guest: "Guest", tools: Tools) -> None:
    """Define the domain from the record; raises VirtbusError."""
    image = guest.image.latest
    if image is None:
        raise VirtbusError(Code.UNAVAILABLE, "no_image", "the disks are not ready; tried again")
    guest.seen.accelerator = tools.accelerator(record)
    disks = await tools.disks.sources(record, image.disks)
    with tracing.span("libvirt define", uid=record.uid):
        await tools.hypervisor.define(
            render(
                DomainInputs(
                    record=record,
                    disks=disks,
                    seeds=tools.seeds.paths(record),
                    console_socket=tools.files.console_socket(record.uid),
                    console_log=tools.files.console_log(record.uid),
                    accelerator=guest.seen.accelerator,
                    emulator=str(tools.settings.wrapper),
                    skip_cpu_queries=tools.settings.fast_start,
                )
            )
        )
    tools.facts.emit(Kind.DOMAIN_DEFINED, record)


async def arm(record: VmRecord, guest: "Guest", tools: Tools) -> None:
    """Let the wrapper fetch the tap fds, once; raises VirtbusError."""
    net = guest.net.latest
    if not has_nics(record):
        return
    if net is None:
        message = "the network is not ready; tried again"
        raise VirtbusError(Code.UNAVAILABLE, "no_network", message)
    devices = nic_devices(len(net.interfaces))
    nics = tuple(
        ArmNic(device=device, mac=interface.mac)
        for device, interface in zip(devices, net.interfaces, strict=True)
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
