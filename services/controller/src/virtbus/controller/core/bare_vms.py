"""Decides how a create gives disks to a VM that only holds its network: a pod's sandbox (ADR 0059).

The container runtime of a node creates such a VM first. A second create with the same uid adds the
disks.
"""

from virtbus.bus.client.owners import node_of
from virtbus.schemas.network import NetworkState
from virtbus.schemas.vm import VmRecord


def brings_disks(wanted: VmRecord) -> bool:
    """Return True for a create that may be the second create."""
    held = wanted.spec.network_state is NetworkState.HELD
    return held and bool(wanted.spec.volumes and node_of(wanted.owner)) and not wanted.powered


def is_bare(record: VmRecord) -> bool:
    """Return True for a VM without disks that is off, and whose spec has a `network_state`."""
    off = not (record.powered or record.ending)
    return off and record.spec.network_state is not None and not record.spec.volumes


def completed(bare: VmRecord, wanted: VmRecord) -> VmRecord | None:
    """Return the record of a bare VM with the disks of a second create.

    Return None if `bare` is not bare, or if `wanted` differs in a part that the second create must
    repeat. Neither the network nor the node of the VM changes.
    """
    if not is_bare(bare) or _fixed(bare) != _fixed(wanted):
        return None
    given = ("labels", "annotations", "spec", "spec_hash", "image_targets", "traceparent")
    update = {field: getattr(wanted, field) for field in given}
    return bare.model_copy(update={**update, "generation": bare.generation + 1})


def _fixed(record: VmRecord) -> tuple[object, ...]:
    spec = record.spec
    nics = spec.domain.devices.interfaces
    return record.namespace, record.name, record.owner, spec.networks, spec.node_selector, nics
