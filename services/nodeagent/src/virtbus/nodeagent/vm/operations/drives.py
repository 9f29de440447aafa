"""Ejects and inserts the media of a running guest's CD-ROM drives."""

from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.disks import drives, is_drive
from virtbus.nodeagent.core.domain_xml import default_order, volume_files
from virtbus.nodeagent.vm.dependencies import Dependency
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import ImageReady
from virtbus.schemas.vm import VmRecord


async def set_drives(record: VmRecord, image: Dependency[ImageReady], tools: AgentPorts) -> None:
    """Bring the drives to the state that the record asks for.

    Raises:
        VirtbusError: 409 `tray_locked`; 503 `no_image`; libvirt does not answer, or refuses.
    """
    spec, made = record.spec, image.latest
    if not any(map(is_drive, spec.domain.devices.disks)):
        return
    if made is None:
        raise VirtbusError(
            Code.UNAVAILABLE, "no_image", "the disks are not known yet; the agent retries"
        )
    sources = await tools.disks.sources(record, made.disks)
    files = volume_files(sources, tools.seeds.paths(record))
    await tools.hypervisor.set_drives(record.uid, drives(spec.domain, files, default_order(record)))
