"""Derives the attachment from a record, before any address is known."""

from virtbus.netd.core import names
from virtbus.netd.core.attachment import Attachment, Nic, NicKind
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.vm import VmRecord

BUILT_IN = "default"


def plan_of(record: VmRecord) -> Attachment:
    """Return the attachment for a record; its MACs are known, its addresses are not.

    Raises:
        VirtbusError: 400 if an interface names no network, or a MAC appears twice.
    """
    networks = {network.name: network.network for network in record.spec.networks}
    nics: list[Nic] = []
    for index, interface in enumerate(record.spec.domain.devices.interfaces):
        network = networks.get(interface.name)
        if network is None:
            raise _invalid(
                f"spec.domain.devices.interfaces[{index}].name",
                f"no entry of spec.networks is named '{interface.name}'; add one",
            )
        mac = interface.mac_address or names.guest_mac(record.uid, index)
        if mac in [nic.mac for nic in nics]:
            raise _invalid(
                f"spec.domain.devices.interfaces[{index}].mac_address",
                f"{mac} appears twice in this VM; give each interface its own",
            )
        nics.append(
            Nic(
                index=index,
                name=interface.name,
                network=network,
                kind=NicKind.BRIDGE if network == BUILT_IN else NicKind.CNI,
                mac=mac,
                host_link=names.host_link(record.uid, index),
            )
        )
    return Attachment(
        uid=record.uid,
        epoch=record.epoch,
        generation=record.generation,
        namespace=record.namespace,
        vm_name=record.name,
        firmware_uuid=record.spec.domain.firmware.uuid,
        nics=tuple(nics),
    )


def _invalid(path: str, message: str) -> VirtbusError:
    details = (Detail(path=path, message=message),)
    return VirtbusError(Code.INVALID, "invalid", f"{path}: {message}", details=details)
