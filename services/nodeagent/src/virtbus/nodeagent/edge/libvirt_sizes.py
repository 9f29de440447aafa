"""Asks the servers of pools how large each volume's data is, through a QEMU without a guest.

A place is the location of one volume's data on a server. A hostile server that takes over this QEMU
finds no guest in it. The QEMU's memory, CPU time and lifetime are limited (ADR 0060). `_label`
explains the user of the QEMU. If the agent is killed, libvirt ends the QEMU. If libvirt fails to do
that, the next agent's `sweep` ends the QEMU.
"""

import asyncio
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

import libvirt

from virtbus.bus.runtime.pool_settings import ServerPool
from virtbus.nodeagent.core.element import Element, el, to_text
from virtbus.nodeagent.core.network_disks import NetworkDisk, network_source
from virtbus.nodeagent.core.servers.kinds import server_of
from virtbus.nodeagent.core.servers.port import Login
from virtbus.nodeagent.edge.libvirt_errors import cause
from virtbus.nodeagent.edge.libvirt_links import LibvirtLinks
from virtbus.nodeagent.edge.libvirt_logins import LibvirtLogins
from virtbus.schemas.disk import DISK_MAX
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.pool import MESSAGE_MAX

log = logging.getLogger(__name__)

ASK_S = 20.0
"""Time limit of a question about all places of a pool. At the limit, the agent ends the QEMU."""
END_S = 40.0
"""Time limit for ending the QEMU. libvirt alone waits up to 15 s for a QEMU that does not die."""
AGAIN_S = 60.0
"""Delay until the next try after a failed sweep."""
_MEMORY_KIB = 512 * 1024
_QUOTA_US = 50_000
"""CPU time of the QEMU in each 100 ms, in microseconds."""
_NOBODY = "+65534:+65534"
_LIVE = libvirt.VIR_DOMAIN_AFFECT_LIVE
_FLAGS = libvirt.VIR_DOMAIN_START_PAUSED | libvirt.VIR_DOMAIN_START_AUTODESTROY
_ENDED = {libvirt.VIR_ERR_NO_DOMAIN, libvirt.VIR_ERR_OPERATION_INVALID}
_DOING = "ask a server for sizes"


class LibvirtSizes:
    """Asks one server at a time, so that at most one worker of libvirtd waits for a server."""

    def __init__(
        self, links: LibvirtLinks, ends: LibvirtLinks, logins: LibvirtLogins, node: str
    ) -> None:
        self._links = links
        self._ends = ends
        self._logins = logins
        self._name = f"virtbus-sizes-{node}"
        self._turn = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._said: dict[str, str] = {}

    async def asked(self, name: str, pool: ServerPool) -> dict[str, int]:
        """Return the known sizes of places in bytes, by volume.

        Log the reasons for unknown sizes when the reasons change.
        """
        if not pool.volumes:
            return {}
        login = server_of(pool).login(str(uuid.uuid4()))
        places = sorted(pool.volumes.items())
        disks = {key: _disk(NetworkDisk(pool, place, login)) for key, place in places}
        question = _Question(self._name, _domain(self._name, pool), disks)
        async with self._turn, asyncio.TaskGroup() as group:
            late = group.create_task(self._end_late())
            why = await self._answered(question, login)
            late.cancel()
        missing = (f"{key}: {reason}" for key, reason in question.missing.items())
        self._say(name, "; ".join(filter(None, (why, *missing)))[:MESSAGE_MAX])
        return dict(question.found)

    async def _answered(self, question: "_Question", login: Login | None) -> str:
        """Ask the question; return the reason of a failure, "" after a success."""
        late_s = self._loop.time() + ASK_S
        try:
            async with self._logins.lent([] if login is None else [login]):
                await self._links.run(question.ask, _DOING, timeout_s=ASK_S + END_S)
        except VirtbusError as error:
            is_late = self._loop.time() >= late_s
            return f"no answer in {ASK_S:.0f} s" if is_late else str(error)
        return ""

    def _say(self, name: str, why: str) -> None:
        if why and why != self._said.get(name):
            extra = {"code": "sizes_unknown"}
            log.warning("sizes of the pool %s are unknown: %s", name, why, extra=extra)
        self._said[name] = why

    async def sweep(self) -> None:
        """End the QEMU that a killed agent or libvirtd left. Repeat until libvirt answers."""
        while True:
            async with self._turn:
                if await self._end():
                    return
            await asyncio.sleep(AGAIN_S)

    async def _end_late(self) -> None:
        await asyncio.sleep(ASK_S)
        await self._end()

    async def _end(self) -> bool:
        """End the QEMU, which also ends all calls that wait for it; return False after an error."""
        try:
            await self._ends.run(lambda one: _end(one, self._name), _DOING, timeout_s=END_S)
        except VirtbusError as error:
            log.warning("cannot end %s: %s", self._name, error, extra={"code": "sizes_left"})
            return False
        return True


@dataclass(frozen=True, slots=True)
class _Question:
    """A question about all places of a pool."""

    name: str
    domain: str
    disks: Mapping[str, str]
    """The XML of a disk at each volume's place, by volume."""
    found: dict[str, int] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """The reason why a size stays unknown, by volume."""

    def ask(self, connection: libvirt.virConnect) -> None:
        _end(connection, self.name)
        domain = connection.createXML(self.domain, _FLAGS)
        try:
            domain.setMemoryParameters({"hard_limit": _MEMORY_KIB}, _LIVE)
            domain.setSchedulerParametersFlags({"global_quota": _QUOTA_US}, _LIVE)
            for key, disk in self.disks.items():
                self._ask_one(domain, key, disk)
        finally:
            _end(connection, self.name)

    def _ask_one(self, domain: libvirt.virDomain, key: str, disk: str) -> None:
        try:
            domain.attachDeviceFlags(disk, _LIVE)
        except libvirt.libvirtError as error:
            if not domain.isActive():
                raise
            self.missing[key] = cause(error.get_error_message() or str(error))
            return
        size_bytes = domain.blockInfo("sda")[0]
        domain.detachDeviceFlags(disk, _LIVE)
        if 0 < size_bytes <= DISK_MAX:
            self.found[key] = size_bytes
        else:
            self.missing[key] = f"{size_bytes} bytes is no size of a disk"


def _end(connection: libvirt.virConnect, name: str) -> None:
    try:
        connection.lookupByName(name).destroy()
    except libvirt.libvirtError as error:
        if error.get_error_code() not in _ENDED:
            raise


def _domain(name: str, pool: ServerPool) -> str:
    """Return the XML of a domain without a disk. It is started paused, and never resumed."""
    devices = el(
        "devices",
        el("controller", type="usb", model="none"),
        el("controller", type="scsi", model="virtio-scsi"),
        el("memballoon", model="none"),
    )
    system = el("os", el("type", "hvm", machine="pc"))
    head = (el("name", name), el("memory", "16", unit="MiB"), system, devices)
    return to_text(el("domain", *head, _label(pool), type="qemu"))


def _label(pool: ServerPool) -> Element | None:
    """Return the label that runs QEMU as nobody, a user without access to the disks of guests.

    Return None if the server needs QEMU's own user. Only this user can read the TLS keys for NBD.
    An NFS pool without `user` and `group` accesses its server as this user.
    """
    if server_of(pool).needs_qemus_user:
        return None
    label = el("label", _NOBODY)
    return el("seclabel", label, type="static", model="dac", relabel="no")


def _disk(disk: NetworkDisk) -> str:
    return to_text(
        el(
            "disk",
            el("driver", name="qemu", type="raw"),
            network_source(disk),
            el("target", dev="sda", bus="scsi"),
            el("readonly"),
            type="network",
            device="disk",
        )
    )
