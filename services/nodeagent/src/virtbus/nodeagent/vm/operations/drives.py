"""Ejects and inserts the media of a running guest's CD-ROM drives."""

import asyncio

from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.addresses import Addresses
from virtbus.nodeagent.core.disks import drives
from virtbus.nodeagent.core.domain_xml import default_order, volume_files
from virtbus.nodeagent.vm.dependencies import Dependency
from virtbus.schemas.disk_rules import is_drive
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import ImageReady
from virtbus.schemas.vm import VmRecord

IMAGED_S = 10.0
"""Time limit for imaged's answer. imaged takes longer if it also makes a volume that is being
attached. The agent then retries."""


async def set_drives(
    record: VmRecord, image: Dependency[ImageReady], tools: AgentPorts, kept: Addresses
) -> None:
    """Give the drives the media of the record. `kept` are the drives' addresses.

    Raises:
        VirtbusError: 409 `tray_locked`: the guest locks a tray. 503 `no_image`: imaged has not
            reported the disks within IMAGED_S. An error of imaged or libvirt.
    """
    spec = record.spec
    if not any(map(is_drive, spec.domain.devices.disks)):
        return
    try:
        async with asyncio.timeout(IMAGED_S):
            made = await image.get(record, ask_after_s=tools.settings.ask_after_s)
    except TimeoutError:
        message = "the disks are not known yet; the agent retries"
        raise VirtbusError(Code.UNAVAILABLE, "no_image", message) from None
    sources = await tools.disks.sources(record, made.disks, running=True)
    files = volume_files(sources, tools.seeds.paths(record))
    wanted = drives(spec.domain, files, default_order(record), kept)
    await tools.hypervisor.set_drives(record.uid, wanted)
    await tools.disks.drop_media(record.uid, sources)
