"""Finds orphans and faults of networks on this host, for audits by the agent.

The audit covers only resources with this netd's mark: its bridges, their ports, and namespaces
whose `lo` has the mark.
"""

from functools import partial

from virtbus.netd.attachments import Attachments
from virtbus.netd.builder import HostPorts
from virtbus.netd.core import names
from virtbus.netd.core.attachment import Attachment
from virtbus.netd.edge.guest_links import GuestLinks
from virtbus.netd.edge.host_bridges import is_bridged
from virtbus.netd.edge.namespaces import in_thread
from virtbus.netd.edge.netlink import Netlink
from virtbus.schemas.errors import VirtbusError

HOST = ""
"""The key of the host side, which has no uid."""


class OrphanAudit:
    """Inspects the host. Reports no orphans and no faults while netd recovers."""

    def __init__(self, doors: HostPorts, attachments: Attachments) -> None:
        self._doors = doors
        self._attachments = attachments
        self.links = GuestLinks(doors.namespaces, doors.attachers, doors.groups)
        self._bridges = doors.attachers.bridges

    async def held(self) -> dict[str, tuple[str, ...]]:
        """Return all network resources by uid, including orphans."""
        found = self._attachments.resources()
        for uid, things in (await self.strays()).items():
            found[uid] = (*found.get(uid, ()), *things)
        return found

    async def strays(self) -> dict[str, list[str]]:
        if self._attachments.recovering:
            return {}
        found: dict[str, list[str]] = {}
        for uid, what in [*await self._stray_namespaces(), *await in_thread(self._stray_links)]:
            found.setdefault(uid, []).append(what)
        return found

    async def remove(self, uid: str) -> bool:
        netns = names.netns(uid)
        things = (await self.strays()).get(uid, [])
        if f"netns {netns}" in things:
            await in_thread(lambda: self._doors.namespaces.remove(netns))
        host_links = [what.removeprefix("link ") for what in things if what.startswith("link ")]
        if host_links:
            await in_thread(lambda: self.links.delete_host_links(host_links))
        return bool(things)

    async def faults(self) -> dict[str, tuple[str, ...]]:
        """Return messages about faults by uid, and about the host side under `HOST`."""
        if self._attachments.recovering:
            return {}
        found = {HOST: await in_thread(self._of_host)}
        for attachment in self._attachments.ready():
            if attachment.joined.nics:
                found[attachment.uid] = await self._of(attachment.joined)
        return {uid: tuple(faults) for uid, faults in found.items() if faults}

    async def mend(self) -> None:
        """Repair networks, and remove bridges of earlier settings or without VMs."""
        await self._attachments.replug()
        await self._attachments.compare()
        if self._attachments.recovering:
            return
        for name in await in_thread(self._former):
            await in_thread(partial(self._doors.bridge.remove_former, name))
        async with self._attachments.host_side:
            for bridge, needed in self._bridges.needed(self._attachments.nics()):
                if not needed:
                    await in_thread(partial(self._bridges.remove, bridge))

    async def of_vm(self, attachment: Attachment) -> tuple[list[str], set[str]]:
        """Return messages about faults of a VM's network, in its namespace and on the host.

        Also return the VM's taps that a process has open.
        """
        found, held = await self._of(attachment), set[str]()
        if self._doors.namespaces.exists(attachment.netns):
            held = await in_thread(lambda: self.links.held(attachment))
        for bridge in {self._bridges.of(nic) for nic in attachment.nics if is_bridged(nic)}:
            found += await in_thread(partial(bridge.faults, needed=True))
        if await in_thread(lambda: self._doors.ports.is_missing(attachment.uid)):
            found.append("the published ports of this host: gone")
        return found, held

    # --- inspect ---------------------------------------------------------------------------------
    async def _stray_namespaces(self) -> list[tuple[str, str]]:
        held = self._attachments.resources()
        found = []
        for name in self._doors.namespaces.names():
            uid = names.uid_of_netns(name)
            if uid is None or uid in held:
                continue
            if await in_thread(partial(self.links.is_ours, name)):
                found.append((uid, f"netns {name}"))
        return found

    def _stray_links(self) -> list[tuple[str, str]]:
        with Netlink() as host:
            ports = self._bridges.ports(host)
        known = self._attachments.links_known()
        return [(uid, f"link {name}") for name, uid in ports.items() if uid and name not in known]

    def _former(self) -> list[str]:
        with Netlink() as host:
            return self._bridges.built_in.former(host, self._bridges.names())

    def _of_host(self) -> list[str]:
        faults = [f"bridge {name}: of earlier settings" for name in self._former()]
        nics = self._attachments.nics()
        for bridge, needed in self._bridges.needed(nics):
            # if `untidy` is set, netd is about to remove unused bridges
            if needed or not self._attachments.untidy.is_set():
                faults += bridge.faults(needed=needed)
        return faults

    async def _of(self, attachment: Attachment) -> list[str]:
        if not self._doors.namespaces.exists(attachment.netns):
            return [f"{attachment.netns}: gone"]
        attachers = self._doors.attachers
        try:
            return [
                *await in_thread(lambda: self.links.faults(attachment)),
                *await in_thread(lambda: attachers.verify(attachment.nics)),
            ]
        except (VirtbusError, OSError) as error:
            return [str(error)]
