"""Makes and removes the network of one VM on the host."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from virtbus.netd.core.address_assignment import refusal
from virtbus.netd.core.attachment import Attachment, Nic
from virtbus.netd.core.dhcp_offer import DhcpSettings, all_offers
from virtbus.netd.core.names import mac_bytes
from virtbus.netd.core.node_groups import NodeGroupBook
from virtbus.netd.edge.attachers import Attachers
from virtbus.netd.edge.attachment_store import AttachmentStore
from virtbus.netd.edge.cni import Cni
from virtbus.netd.edge.dhcp_server import DhcpServer, Foreign
from virtbus.netd.edge.guest_links import GuestLinks
from virtbus.netd.edge.host_bridge import HostBridge
from virtbus.netd.edge.host_links import link_names
from virtbus.netd.edge.hot_taps import return_lent
from virtbus.netd.edge.namespaces import Namespaces, in_thread
from virtbus.netd.edge.plugin_process import end_left
from virtbus.netd.edge.published_ports import PublishedPorts
from virtbus.netd.edge.qemu_processes import QemuProcesses
from virtbus.netd.names_keeper import NamesKeeper
from virtbus.netd.plugin_chains import Keep, PluginChains
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.nic import NicBinding
from virtbus.schemas.node_rpc import NetReady

log = logging.getLogger(__name__)

Begun = Callable[[NetReady], Awaitable[None]]
"""Called when the MACs of a network are known, and a CNI plugin is about to run."""
BUILDS_AT_ONCE = 8
"""Maximum number of networks that are built at once. The kernel's rtnl lock would delay more."""


@dataclass(frozen=True, slots=True)
class HostPorts:
    """The objects through which netd acts on the host."""

    namespaces: Namespaces
    bridge: HostBridge
    files: AttachmentStore
    cni: Cni
    dhcp: DhcpServer
    emulators: QemuProcesses
    resolver: NamesKeeper
    ports: PublishedPorts
    attachers: Attachers
    groups: NodeGroupBook


async def silent(_ready: NetReady) -> None:
    """The `Begun` of callers that send no report."""


@contextmanager
def _new_sockets() -> Iterator[list[socket.socket]]:
    """Yield a list for a network's sockets. Those that remain in it are closed at the end.

    A thread fills the list, also if the call that started the thread is cancelled.
    """
    sockets: list[socket.socket] = []
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close()


class Builder:
    """Makes, completes and removes networks.

    Every method may be cancelled. The next call completes or removes partial results.
    """

    def __init__(self, doors: HostPorts, site: DhcpSettings) -> None:
        self._doors = doors
        self._site = site
        self.links = GuestLinks(doors.namespaces, doors.attachers, doors.groups)
        nics = doors.attachers.plugin_reach
        self._chains = PluginChains(doors.namespaces, doors.cni, lambda: nics.nics())
        self.insistent = self._chains.insistent

    def stands(self, attachment: Attachment) -> bool:
        return not attachment.joined.nics or self._doors.namespaces.exists(attachment.netns)

    async def found(self, attachment: Attachment) -> bool:
        """Ensure that the namespace has its name; return False if the namespace is gone.

        A namespace whose name was removed still exists while a guest or a DHCP socket is in it.
        """
        return self.stands(attachment) or await in_thread(lambda: self._name_again(attachment))

    def _name_again(self, attachment: Attachment) -> bool:
        fd = self._doors.dhcp.namespace(attachment.uid)
        if fd is None:
            pid = self._doors.emulators.running({attachment.uid}).get(attachment.uid)
            fd = self._doors.emulators.namespace(pid) if pid is not None else None
        if fd is None:
            return False
        self._doors.namespaces.put_back(attachment.netns, fd)
        extra = {"code": "netns_named_again", "uid": attachment.uid}
        log.warning("restored %s, which somebody removed", attachment.netns, extra=extra)
        return True

    async def mend(self, attachment: Attachment) -> list[str]:
        """Complete an existing network; return a message about each missing part.

        Raises:
            VirtbusError, OSError: the network cannot be completed, for example because its CNI
                link is gone.
        """
        faults = await in_thread(lambda: self.links.faults(attachment.joined))
        if any(nic.publish for nic in attachment.nics):
            await write_ports(self._doors.ports.mend)
        if faults:
            await self.adopt(attachment, keeps_running=True)
        return faults

    async def tune(self, attachment: Attachment) -> None:
        """Apply the link states and limits. Raises VirtbusError."""
        try:
            await in_thread(lambda: self.links.tune(attachment))
        except OSError as error:
            raise refusal(error) from error

    async def guard(self, attachment: Attachment) -> None:
        """Apply the filters of an existing network. Raises OSError, VirtbusError."""
        await in_thread(lambda: self.links.guard(attachment))

    async def runs(self, uid: str) -> bool:
        return bool(await in_thread(lambda: self._doors.emulators.running({uid})))

    async def end_plugins(self, attachments: Iterable[Attachment]) -> None:
        uids = {attachment.uid for attachment in attachments if attachment.has_cni}
        if not uids:
            return
        directory = self._doors.namespaces.path("x").parent
        for pid in await in_thread(lambda: end_left(uids, directory)):
            log.warning("a plugin of an earlier netd ended", extra={"code": "cni_left", "pid": pid})

    async def completes(self, attachment: Attachment) -> bool:
        try:
            await self.mend(attachment)
        except (VirtbusError, OSError) as error:
            extra = {"code": "network_not_whole", "uid": attachment.uid}
            log.warning("the network cannot be completed: %s", error, extra=extra)
            return False
        return True

    async def built_in(self, attachment: Attachment) -> None:
        """Make or complete a network without CNI interfaces. The state file is durable afterwards.

        Raises:
            VirtbusError: the errors of `PublishedPorts.claim`, if a published port is in use. The
                errors of `GuestLinks.build`.
            OSError: an error of the kernel.
        """
        await self._claim_ports(attachment)
        files = self._doors.files
        refused: Exception | None = None
        with _new_sockets() as sockets:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(in_thread(lambda: files.sync(attachment.uid)))
                    group.create_task(
                        in_thread(lambda: sockets.extend(self.links.build(attachment)))
                    )
            except* (VirtbusError, OSError) as failed:
                refused = failed.exceptions[0]
            if refused is not None:
                raise refused
            self._serve(attachment, sockets)

    async def with_cni(
        self, attachment: Attachment, keep: Keep, begun: Callable[[], Awaitable[None]]
    ) -> None:
        """Make a network with CNI interfaces.

        `begun` is awaited before the first plugin runs. It is skipped if plugins of a network are
        known to choose the MAC.

        Raises:
            VirtbusError: the error of a plugin. 409 `cni_mac`: a plugin chose another MAC. The
                errors of `built_in`.
        """
        await self._claim_ports(attachment)
        insists = any(nic.network in self.insistent for nic in attachment.nics)
        if not insists:
            await begun()
        before = await in_thread(lambda: self._opened(attachment))
        attachment = await self._chains.add(attachment, attachment.nics, keep, before)
        await self.adopt(attachment)
        keep(attachment.model_copy(update={"made": True}))

    def _opened(self, attachment: Attachment) -> frozenset[str]:
        """Make the namespace; return the names of the links that the host had before."""
        before = link_names()
        self.links.open_namespace(attachment)
        return before

    async def connect(self, attachment: Attachment, nic: Nic, keep: Keep) -> Attachment:
        """Run the CNI plugins of one interface of a running guest, if they have not run yet.

        Raises:
            VirtbusError: the errors of `with_cni`. The plugins have then been undone, or DEL
                failed, too.
        """
        if nic.cni is None or nic.cni.result is not None:
            return attachment
        before = await in_thread(lambda: self._opened(attachment.joined))
        done = await self._chains.add(attachment, [nic], keep, before)
        keep(done)
        return done

    async def disconnect(self, attachment: Attachment, nic: Nic) -> None:
        """Stop passt of one interface, or run DEL of its CNI plugins.

        Raises:
            VirtbusError: 500 `cni_failed`: a plugin failed on DEL. 500 `passt_stays`: passt still
                runs.
        """
        if nic.binding is NicBinding.PASST:
            passt = self._doors.attachers.passt
            await in_thread(lambda: passt.end(attachment.uid, (nic.index,)))
        if failed := await self._chains.delete(attachment.with_nics((nic,))):
            raise failed

    async def _claim_ports(self, attachment: Attachment) -> None:
        if any(nic.publish for nic in attachment.nics):
            await in_thread(lambda: self._doors.ports.claim(attachment))

    async def adopt(self, attachment: Attachment, *, keeps_running: bool = False) -> None:
        """Complete a network whose CNI links exist, and serve DHCP in it.

        Pending interfaces are left alone. `keeps_running` is as in `GuestLinks.build`. A caller
        that adds an interface leaves it False.
        """
        joined = attachment.joined

        def complete() -> None:
            self._doors.files.sync(attachment.uid)
            self._doors.ports.adopt(joined)
            sockets.extend(self.links.build(joined, keeps_running=keeps_running))

        with _new_sockets() as sockets:
            await in_thread(complete)
            self._serve(joined, sockets)

    def _serve(self, attachment: Attachment, sockets: list[socket.socket]) -> None:
        """Serve the sockets, and take them out of the list."""
        found = all_offers(attachment, self._site, self._doors.resolver.domain)
        offers = [
            Foreign(nic.index, mac_bytes(nic.mac)) if nic.on_segment else offer
            for nic, offer in zip(attachment.nics, found, strict=True)
        ]
        self._doors.dhcp.serve(attachment.uid, sockets.copy(), offers)
        sockets.clear()
        self._doors.resolver.serve(attachment)

    async def unmake(self, attachment: Attachment) -> None:
        """Remove the network of a VM, but not its state file.

        The kernel frees the namespace a little later.

        Raises:
            VirtbusError: 500 `cni_failed`: a plugin failed on DEL. 500 `passt_stays`: passt still
                runs. Even after an error, everything else of the network is gone.
        """
        self._doors.dhcp.stop(attachment.uid)
        self._doors.resolver.stop(attachment.uid)
        failed = await self._chains.delete(attachment)
        bound = [nic.index for nic in attachment.nics if nic.binding is NicBinding.PASST]
        if bound:
            try:
                await in_thread(lambda: self._doors.attachers.passt.end(attachment.uid, bound))
            except VirtbusError as error:
                failed = failed or error
        await in_thread(lambda: self._doors.namespaces.remove(attachment.netns))
        if attachment.changing:
            await in_thread(lambda: return_lent(attachment))
        if any(nic.publish for nic in attachment.nics):
            await in_thread(lambda: self._doors.ports.drop(attachment.uid))
        if failed is not None:
            raise failed


async def write_ports(write: Callable[[], None]) -> bool:
    """Write the table of published ports; return False if that failed.

    If the kernel refuses the table, netd must still serve other VMs. A failure is only logged.
    """
    try:
        await in_thread(write)
    except (VirtbusError, OSError) as error:
        log.warning("published ports not written: %s", error, extra={"code": "ports_failed"})
        return False
    return True
