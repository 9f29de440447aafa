"""Plugs interfaces into a running guest's network, and removes them from it.

The agent requests each step. After an interruption, the agent repeats the step, or the guest's next
start makes the VM's whole network. The state file names an interface before its first link is made,
and until its last link is gone.
"""

import logging
from collections.abc import Callable
from functools import partial

from virtbus.netd.builder import Builder, HostPorts
from virtbus.netd.core.address_assignment import (
    check_macs,
    refusal,
    replaced,
)
from virtbus.netd.core.attachment import Attachment, Nic
from virtbus.netd.core.hotplug import differs, grown, not_attached, of_name
from virtbus.netd.core.used_nics import UsedNics
from virtbus.netd.edge import hot_taps
from virtbus.netd.edge.host_bridges import is_bridged
from virtbus.netd.edge.namespaces import in_thread
from virtbus.netd.network_entry import NetworkEntry
from virtbus.netd.plugin_chains import Keep
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.nic_work import NicDone, NicWork

log = logging.getLogger(__name__)


class HotNics:
    """Does the steps of hot-plug and unplug. The caller holds the VM's lock."""

    def __init__(self, doors: HostPorts, builder: Builder) -> None:
        self._doors = doors
        self._builder = builder

    async def is_bare(self, plan: Attachment, known: Attachment | None) -> bool:
        """Return True if `plan` adds the first interfaces of a running guest."""
        bare = known is None or not known.nics
        # generation 1 is a VM's create: skip the slow search of all processes
        changed = bare and bool(plan.nics) and plan.generation > 1
        return changed and await self._builder.runs(plan.uid)

    async def in_use(self, attachment: Attachment) -> bool:
        """Return True while a guest runs with this network, even a guest without interfaces."""
        links = self._builder.links
        held = bool(attachment.nics) and await in_thread(lambda: links.in_use(attachment))
        if held:
            return True
        return attachment.changing and await self._builder.runs(attachment.uid)

    async def change(
        self,
        entry: NetworkEntry | None,
        want: NicWork,
        used: UsedNics,
        keep: Callable[[NetworkEntry, Attachment], None],
    ) -> NicDone:
        """Do one step for an interface.

        A repeated step is safe. `used` has the interfaces of all VMs.

        Raises:
            VirtbusError: 404 `nic_unknown`: netd has no such interface (not for `drop`).
                409 `tap_busy`: a process has the tap open.
                409 `tap_lost`: the tap is gone.
                409 `mac_in_use`: another interface has the MAC.
                The error of a failed network, of the kernel, or of a CNI plugin.
                The errors of `PublishedPorts.claim`.
                409 `link_taken`: another VM has a link with the name of the lent tap.
                429: no address is free.
        """
        nic = of_name(entry.attachment, want.name) if entry is not None else None
        if entry is None or nic is None:
            if want.do == "drop":
                return NicDone(uid=want.uid, name=want.name)
            raise not_attached(want.uid, want.name)
        if entry.error is not None:
            raise VirtbusError.of(entry.error)
        kept = partial(keep, entry)
        try:
            match want.do:
                case "lend":
                    return await self._lend(entry.attachment, nic, used, kept)
                case "join":
                    return await self._join(entry.attachment, nic, kept)
                case "drop":
                    return await self._drop(entry.attachment, nic, kept)
        except OSError as error:
            raise refusal(error) from error

    async def _lend(self, attachment: Attachment, nic: Nic, used: UsedNics, keep: Keep) -> NicDone:
        """Assign the interface's address, and make its tap in the host's namespace for libvirt."""
        await self._refuse_held(attachment, nic)
        if not nic.pending or not nic.addresses:
            nic = self._settled(attachment, nic, used)
            attachment = replaced(attachment, nic)
            keep(attachment)
        check_macs(attachment.with_nics((nic,)), used)
        if nic.publish:
            await in_thread(lambda: self._doors.ports.claim(attachment))
        attachment = await self._builder.connect(attachment, nic, keep)
        nic = _named(attachment, nic.name)
        check_macs(attachment.with_nics((nic,)), used)
        tap = await in_thread(lambda: hot_taps.lend(attachment, nic))
        return _done(attachment, nic, tap)

    def _settled(self, attachment: Attachment, nic: Nic, used: UsedNics) -> Nic:
        nic = nic.model_copy(update={"pending": True})
        if nic.cni is not None:
            return nic
        own = [each for each in attachment.nics if each.index != nic.index]
        alone = attachment.with_nics((nic,))
        return self._doors.attachers.plan(alone, used, own).nics[0]

    async def _join(self, attachment: Attachment, nic: Nic, keep: Keep) -> NicDone:
        joined = replaced(attachment, nic.model_copy(update={"pending": False}))
        if nic.pending:
            namespaces = self._doors.namespaces
            await in_thread(lambda: self._builder.links.open_namespace(joined.joined))
            await in_thread(lambda: hot_taps.bring_in(namespaces, joined, nic))
            await self._builder.adopt(joined)
            keep(joined)
        return _done(joined, nic)

    async def _drop(self, attachment: Attachment, nic: Nic, keep: Keep) -> NicDone:
        """Remove an interface whose device QEMU has released.

        If the VM's record has the interface again, the interface stays as pending.
        """
        await self._refuse_held(attachment, nic)
        gone = nic.model_copy(update={"pending": True})
        attachment = replaced(attachment, gone)
        keep(attachment)
        namespaces = self._doors.namespaces
        await self._builder.disconnect(attachment, gone)
        await in_thread(lambda: hot_taps.remove(namespaces, attachment, gone))
        if gone.leaving:
            rest = attachment.with_nics(each for each in attachment.nics if each != gone)
        else:
            ours = is_bridged(gone)
            bare = {"cni": None, "addresses": gone.addresses if ours else ()}
            rest = replaced(attachment, gone.model_copy(update=bare))
        if gone.publish:
            await in_thread(lambda: self._doors.ports.claim(rest.joined))
        if namespaces.exists(rest.netns):
            await self._builder.adopt(rest, keeps_running=True)
        keep(rest)
        return _done(rest, gone)

    async def _refuse_held(self, attachment: Attachment, nic: Nic) -> None:
        await in_thread(lambda: hot_taps.refuse_held(self._doors.namespaces, attachment, nic))


def changed(attachment: Attachment, wanted: Attachment) -> Attachment:
    """Return a running guest's attachment after a change of its record to `wanted`; see `grown`."""
    if differs(attachment, wanted):
        extra = {"code": "network_kept", "uid": attachment.uid}
        log.info("the guest keeps its old interfaces until it restarts", extra=extra)
    return grown(attachment, wanted)


def _named(attachment: Attachment, name: str) -> Nic:
    nic = of_name(attachment, name)
    if nic is None:
        raise not_attached(attachment.uid, name)
    return nic


def _done(attachment: Attachment, nic: Nic, tap: str = "") -> NicDone:
    return NicDone(
        uid=attachment.uid, name=nic.name, mac=nic.mac, mtu=nic.mtu, queues=nic.queues, tap=tap
    )
