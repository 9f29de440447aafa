"""Resolves names for guests of the built-in network and of overlays, on the gateway's address.

Names of VMs are answered here, all others by the host's DNS servers. A guest finds the VMs of its
own namespace, and of those that controllers open to it.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import IPv4Address, ip_address

from virtbus.netd.core import dns_message
from virtbus.netd.core.attachment import Attachment
from virtbus.netd.core.dns_message import BadQueryError, DnsQuery
from virtbus.netd.core.gateways import Gateways
from virtbus.netd.core.guest_names import GuestNames, NamedVm, vm_of
from virtbus.netd.core.query_limits import QueryLimits
from virtbus.netd.core.reach import Address, is_host
from virtbus.netd.core.zone import Meaning, ReverseName, VmName, Zone, ZoneName
from virtbus.netd.edge.dns_forwarder import Forwarder
from virtbus.netd.edge.dns_server import DnsGuest, DnsServer
from virtbus.netd.edge.host_servers import HostServers
from virtbus.netd.fleet_names import FleetNames, Lookup
from virtbus.schemas.names import NameAnswer

log = logging.getLogger(__name__)


class Resolver:
    """Serves each VM from `serve` to `stop`, within `running`; outside of it, does nothing."""

    def __init__(
        self,
        gateways: Gateways,
        domain: str,
        servers: HostServers,
        node: str,
    ) -> None:
        """`domain` is the domain of VMs' names; if it is empty, guests get no resolver."""
        self._gateway = gateways.four.ip
        network6 = gateways.six.network if gateways.six is not None else None
        self._zone = Zone(domain, gateways.four.network, network6)
        self._node = node
        self._forwarder = Forwarder(servers.addresses)
        self._server = DnsServer(gateways.four.ip, self._resolve)
        self._guests = GuestNames()
        self._fleet: FleetNames | None = None

    @property
    def domain(self) -> str:
        """Return the domain of VMs' names; empty if names are not served."""
        return self._zone.domain if self._fleet is not None else ""

    @property
    def addresses(self) -> tuple[IPv4Address, ...]:
        """Return the address at which guests ask; none if names are not served."""
        return (self._gateway,) if self._fleet is not None else ()

    @asynccontextmanager
    async def running(self, fleet: FleetNames) -> AsyncIterator[None]:
        """Serve names if there is a domain, and if no other server has the port."""
        async with AsyncExitStack() as stack:
            if self._zone.domain:
                try:
                    await stack.enter_async_context(self._server.running())
                except OSError as error:
                    log.error(
                        "VMs have no names: port 53 of %s cannot be opened (%s); let the host's "
                        "DNS server listen on its own addresses only, or empty the setting `zone`",
                        self._gateway,
                        error,
                        extra={"code": "resolver_port"},
                    )
                else:
                    self._fleet = fleet
            try:
                yield
            finally:
                self._fleet = None

    def serve(self, attachment: Attachment) -> None:
        """Give the VM its name, and answer queries from its addresses; repeatable."""
        if self._fleet is None:
            return
        vm = vm_of(attachment)
        for address in set(self._guests.remove(vm.uid)).difference(dict(vm.gateways)):
            self._server.stop(address)
        self._guests.put(vm)
        for address, gateway in vm.gateways:
            try:
                self._server.serve(address, gateway)
            except OSError as error:
                extra = {"code": "resolver_socket", "uid": vm.uid}
                log.warning("%s gets no answers to DNS queries: %s", address, error, extra=extra)

    def stop(self, uid: str) -> None:
        """Forget a VM."""
        for address in self._guests.remove(uid):
            self._server.stop(address)

    # --- queries --------------------------------------------------------------------------
    async def _resolve(self, guest: DnsGuest, message: bytes, tcp: bool) -> bytes | None:
        vm = self._guests.at(guest.address)
        if vm is None:
            return None
        try:
            query = dns_message.read(message)
        except BadQueryError as error:
            return error.reply
        meaning = self._zone.meaning(query.labels)
        if meaning is not None:
            answer = await self._known(vm, guest.limits, query, meaning)
            if answer is not None:
                return answer
        return await self._forwarder.ask(message, tcp=tcp) or dns_message.failure(query)

    async def _known(
        self, vm: NamedVm, limits: QueryLimits, query: DnsQuery, meaning: Meaning
    ) -> bytes | None:
        """Return the answer of virtbus; None for an address that is not a VM's."""
        match meaning:
            case VmName():
                return await self._vm(vm, limits, query, meaning)
            case ReverseName():
                return await self._address(vm, limits, query, meaning)
            case ZoneName():
                domain = self._zone.domain
                return dns_message.negative(query, domain, exists=meaning.exists)
            case None:
                return None

    async def _vm(self, vm: NamedVm, limits: QueryLimits, query: DnsQuery, wanted: VmName) -> bytes:
        own = wanted.namespace == vm.namespace
        here = self._guests.named(wanted.namespace, wanted.name) if own else None
        if here is not None:
            return dns_message.positive(query, here.addresses_for(vm), self._zone.domain)
        found = await self._find(
            vm, limits, Lookup(vm.namespace, namespace=wanted.namespace, vm=wanted.name)
        )
        if found is None:
            return dns_message.failure(query)
        if not found.found:
            return dns_message.negative(query, self._zone.domain, exists=False)
        return dns_message.positive(query, self._reachable(found), self._zone.domain)

    async def _address(
        self, vm: NamedVm, limits: QueryLimits, query: DnsQuery, wanted: ReverseName
    ) -> bytes | None:
        if wanted.own:
            here = self._guests.at(wanted.address)
            if here is None or here.namespace != vm.namespace:
                return dns_message.negative(query, wanted.authority, exists=False)
            name = self._zone.name_of(here.namespace, here.name)
            return dns_message.pointer(query, name, wanted.authority)
        if not wanted.address.is_private:
            return None
        found = await self._find(vm, limits, Lookup(vm.namespace, address=str(wanted.address)))
        if found is None or not found.found:
            return None
        name = self._zone.name_of(found.namespace, found.name)
        return dns_message.pointer(query, name, wanted.authority)

    async def _find(self, vm: NamedVm, limits: QueryLimits, want: Lookup) -> NameAnswer | None:
        fleet = self._fleet
        return await fleet.find(want, vm.uid, limits.may_look_up) if fleet is not None else None

    def _reachable(self, found: NameAnswer) -> list[Address]:
        """Return the addresses that guests of this host can reach.

        Each host has guests in the built-in network, so those of another host are not reachable.
        """
        addresses = []
        for text in found.addresses:
            try:
                address = ip_address(text)
            except ValueError:
                continue
            elsewhere = found.node != self._node and self._zone.has(address)
            if is_host(address) and not elsewhere:
                addresses.append(address)
        return addresses
