"""Decides which names and addresses of other VMs a guest may know."""

from collections.abc import Iterable, Mapping

from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.network_demand import NO_TARGETS, Targets
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.names import MAX_ADDRESSES, NameAnswer
from virtbus.schemas.network_object import NetworkKind
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.vm_status import VmStatus

EVERY = "*"
_OF_ONE_HOST = frozenset({NetworkKind.NAT, NetworkKind.ISOLATED})

Openings = Mapping[str, tuple[str, ...]]
"""By namespace: the other namespaces whose guests may resolve the names of its VMs. `*` stands for
all namespaces."""


def asker_of(fleet: Fleet, node: str, uid: str) -> VmRecord:
    """Return the record of the VM `uid`; raise VirtbusError 403 if the VM is not on `node`."""
    held = fleet.vms.get(uid)
    if held is None or held.record.node != node:
        message = f"the node {node} does not have the VM {uid}, so its guest may ask for no name"
        raise VirtbusError(Code.DENIED, "not_on_node", message)
    return held.record


def answer(
    fleet: Fleet, uids: Iterable[str], asker: VmRecord, opened: Openings, address: str = ""
) -> NameAnswer:
    """Return the first VM of `uids` that has `address`, and that the guest of `asker` may know.

    If `address` is empty, the VM's addresses do not matter.
    """
    for uid in uids:
        held = fleet.vms.get(uid)
        if held is None or not _may_know(asker, held.record, opened):
            continue
        addresses = addresses_of(fleet.last_status(held.record), held.record.network_targets)
        if address and address not in addresses:
            continue
        record = held.record
        return NameAnswer(
            found=True,
            node=record.node,
            namespace=record.namespace,
            name=record.name,
            addresses=addresses,
        )
    return NameAnswer()


def _may_know(asker: VmRecord, record: VmRecord, opened: Openings) -> bool:
    """Return True if the asker's guest may know the VM of `record`.

    One of these suffices: the VM is in the asker's namespace, its namespace is open to the asker's
    namespace, or both VMs are on a network with `share_names`.
    """
    namespace, allowed = asker.namespace, opened.get(record.namespace, ())
    if record.namespace == namespace or EVERY in allowed or namespace in allowed:
        return True
    return not _sharing(asker).isdisjoint(_sharing(record))


def _sharing(record: VmRecord) -> set[str]:
    """Return the uids of the VM's networks with `share_names`."""
    return {one.uid for one in record.network_targets.values() if one.spec.share_names}


def addresses_of(status: VmStatus | None, networks: Targets = NO_TARGETS) -> tuple[str, ...]:
    """Return the addresses that a status reports, without prefix lengths.

    Addresses on nat and isolated networks of `networks` are left out. Each host has the same subnet
    of such a network, so another guest on the asker's host may have the address. The result has at
    most MAX_ADDRESSES addresses, of at most 64 characters each.
    """
    found = [
        one.partition("/")[0]
        for nic in (status.interfaces if status is not None else ())
        if nic.network not in networks or networks[nic.network].spec.kind not in _OF_ONE_HOST
        for one in nic.addresses
    ]
    return tuple(one for one in found[:MAX_ADDRESSES] if len(one) <= 64)
