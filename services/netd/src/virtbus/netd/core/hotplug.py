"""Choice of the interfaces to plug into and unplug from a running guest."""

from virtbus.netd.core.attachment import Attachment, Nic
from virtbus.netd.core.names import host_link
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.nic import NICS_MAX


def grown(known: Attachment, wanted: Attachment) -> Attachment:
    """Return the attachment of a running guest: `known`, updated to its record (`wanted`).

    A new interface becomes pending. An interface that the record no longer has becomes leaving.
    Other interfaces stay unchanged. A new interface is left out as long as `known` has an interface
    of the same name, or no index is free. A record that is older than `known` changes nothing.
    """
    if wanted.generation < known.generation:
        return known
    former = {nic.key: nic for nic in known.nics}
    names = {nic.name for nic in known.nics}
    used = {nic.index for nic in known.nics}
    free = iter(sorted(set(range(NICS_MAX)) - used))
    nics: list[Nic] = []
    for nic in wanted.nics:
        old = former.pop(nic.key, None)
        if old is not None:
            nics.append(old.model_copy(update={"leaving": False, "position": nic.position}))
        elif nic.name not in names and (index := next(free, None)) is not None:
            nics.append(_numbered(nic, wanted.uid, index))
    nics += [nic.model_copy(update={"leaving": True}) for nic in former.values()]
    after = known.with_nics(nics)
    # After a crash, the plugins of a running guest must not be undone: its network counts as made.
    return after.model_copy(update={"made": True}) if after.changing else after


def _numbered(nic: Nic, uid: str, index: int) -> Nic:
    update = {"index": index, "host_link": host_link(uid, index), "pending": True, "addresses": ()}
    return nic.model_copy(update=update)


def first_nics(known: Attachment | None, wanted: Attachment) -> Attachment:
    """Return the attachment of a guest without interfaces. Those of `wanted` are pending."""
    after = grown((known or wanted).with_nics(()), wanted)
    return after.model_copy(update={"epoch": wanted.epoch, "generation": wanted.generation})


def differs(known: Attachment, wanted: Attachment) -> bool:
    """Return True if an interface that stays has other properties than in `wanted`."""
    hardware = {nic.key: nic.hardware for nic in known.nics}
    return any(hardware.get(nic.key, nic.hardware) != nic.hardware for nic in wanted.nics)


def of_name(attachment: Attachment, name: str) -> Nic | None:
    """Return the interface `name`, or None."""
    return next((nic for nic in attachment.nics if nic.name == name), None)


def not_attached(uid: str, name: str) -> VirtbusError:
    """Return 404 `nic_unknown`."""
    message = f"netd has no interface '{name}' of VM {uid}; send it the latest record first"
    return VirtbusError(Code.NOT_FOUND, "nic_unknown", message)


def tap_lost(nic: Nic) -> VirtbusError:
    """Return 409 `tap_lost`: the guest's device has no tap behind it."""
    message = f"the tap of interface '{nic.name}' is gone; unplug the device and plug it again"
    return VirtbusError(Code.CONFLICT, "tap_lost", message)
