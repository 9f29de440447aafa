"""Plugs new NICs into a running guest, and unplugs NICs that its record no longer has.

netd reports a new NIC as waiting, and an old NIC as leaving. The agent plugs the waiting NICs and
unplugs the leaving NICs. libvirt's live XML shows the changes that are done, so that the agent can
continue after a crash at any step.
"""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Literal

from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.guest_nics import (
    DomainNics,
    GuestNic,
    alias_of,
    domain_nics,
    interface_xml,
    states,
)
from virtbus.nodeagent.vm.dependencies import ASK_TIMEOUT_S, Dependency
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.network import PlugState
from virtbus.schemas.nic_work import NicDone, NicWork
from virtbus.schemas.node_rpc import Ensure, NetReady
from virtbus.schemas.vm import Interface, VmRecord
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

RELEASE_S = 5.0
"""The time in which a guest usually releases a device. Later, the guest is asked again."""
POLL_S = 0.1
PLUGIN_TIMEOUT_S = 30.0
"""The longest time that the plugins of a CNI network may take."""


async def sync_nics(
    record: VmRecord, net: Dependency[NetReady], tools: AgentPorts
) -> tuple[dict[str, GuestNic], list[str]]:
    """Plug and unplug until the guest has the NICs of `record`.

    Return the guest's NICs by name, and the names of the NICs that were plugged now. Without a
    running guest, both are empty, because the next start uses the record's NICs.

    Raises:
        VirtbusError: 409 `nic_held`: the guest has not released a NIC. 409 `no_port`: the guest has
            no free PCI port. 409 `nic_waits`: a NIC waits until the guest has released another NIC.
            An error of netd or libvirt. In each case, the other NICs were changed.
        BusError: netd does not answer.
    """
    work = _Changes(record, net, tools)
    if await work.guest() is None:
        return {}, []
    made = await work.report()
    leaving = [one.name for one in made.interfaces if one.plug is PlugState.LEAVING]
    errors = [await work.attempt(work.unplug(name)) for name in leaving]
    if leaving:
        made = await work.report()
    wanted = {nic.name: nic for nic in record.spec.domain.devices.interfaces}
    here = {one.name: one.plug for one in made.interfaces if one.plug is not PlugState.LEAVING}
    waiting = [name for name in wanted if here.get(name) is PlugState.WAITING]
    errors += [await work.attempt(work.plug(wanted[name])) for name in waiting]
    if waiting:
        made = await work.report()
    errors += [_waits(name) for name in wanted if name not in here]
    failed = next((error for error in errors if error is not None), None)
    if failed is not None:
        raise failed
    guest = await work.guest()
    return ({} if guest is None else guest.present(states(made.interfaces))), waiting


class _Changes:
    """The changes of one guest's NICs."""

    def __init__(self, record: VmRecord, net: Dependency[NetReady], tools: AgentPorts) -> None:
        self._record = record
        self._net = net
        self._tools = tools
        self._devices = tools.hypervisor.devices

    async def report(self) -> NetReady:
        """Send the record to netd; return netd's report."""
        subject = subjects.rpc(self._record.node, "netd", "ensure")
        asked = Ensure(record=self._record)
        answer = await self._tools.bus.request(subject, asked, timeout_s=ASK_TIMEOUT_S)
        made = validate(NetReady, answer)
        self._net.receive(made)
        return made

    async def guest(self) -> DomainNics | None:
        """Return the NICs that libvirt shows for the guest now; None if no guest runs."""
        xml = await self._devices.live_xml(self._record.uid)
        return None if xml is None else domain_nics(xml)

    async def attempt(self, change: Awaitable[None]) -> VirtbusError | None:
        """Return the error of a change; None after success."""
        try:
            await change
        except VirtbusError as error:
            return error
        return None

    async def plug(self, nic: Interface) -> None:
        """Plug a NIC, and move its tap to the VM's network."""
        guest, uid = await self.guest(), self._record.uid
        if guest is None:
            return
        if nic.name not in guest.plugged:
            if not guest.free_ports:
                raise _no_port(nic.name)
            lent = await self._netd(nic.name, "lend")
            await self._devices.attach(uid, [interface_xml(nic, lent, guest.free_ports[0])])
        try:
            await self._netd(nic.name, "join")
        except VirtbusError as error:
            if (
                error.reason == "tap_lost"
            ):  # the device is useless: the next attempt plugs a new one
                await self._devices.detach(uid, alias_of(nic))
            raise
        self._say(EventKind.NIC_PLUGGED, nic.name)

    async def unplug(self, name: str) -> None:
        """Unplug a NIC. netd removes it after QEMU has released its device."""
        guest, uid = await self.guest(), self._record.uid
        if guest is None:
            return
        if name in guest.plugged:
            await self._devices.detach(uid, guest.plugged[name].device)
        elif (number := guest.started_as(name)) is not None:
            await self._devices.detach_unknown(uid, number)
        for _look in range(round(RELEASE_S / POLL_S)):
            if not await self._has(name):
                break
            await asyncio.sleep(POLL_S)
        else:
            raise _held(name)
        await self._netd(name, "drop")
        self._say(EventKind.NIC_UNPLUGGED, name)

    async def _has(self, name: str) -> bool:
        """Return True while the guest has the device of NIC `name`."""
        guest = await self.guest()
        if guest is None:
            return False
        number = guest.started_as(name)
        if name in guest.plugged or number is None:
            return name in guest.plugged
        return await self._devices.has_unknown(self._record.uid, number)

    async def _netd(self, name: str, do: Literal["lend", "join", "drop"]) -> NicDone:
        record = self._record
        step = NicWork(uid=record.uid, epoch=record.epoch, name=name, do=do)
        subject = subjects.rpc(record.node, "netd", "nic")
        answer = await self._tools.bus.request(subject, step, timeout_s=PLUGIN_TIMEOUT_S)
        return validate(NicDone, answer)

    def _say(self, kind: EventKind, name: str) -> None:
        self._tools.events.emit(kind, self._record, message=f"interface {name}")


def _held(name: str) -> VirtbusError:
    message = (
        f"the guest has not released interface '{name}' yet; it is asked again. If it never does, "
        "restart the VM"
    )
    return VirtbusError(Code.CONFLICT, "nic_held", message)


def _no_port(name: str) -> VirtbusError:
    message = f"the guest has no free slot for interface '{name}'; restart the VM to give it one"
    return VirtbusError(Code.CONFLICT, "no_port", message)


def _waits(name: str) -> VirtbusError:
    message = f"interface '{name}' waits until the guest has released another one"
    return VirtbusError(Code.CONFLICT, "nic_waits", message)
