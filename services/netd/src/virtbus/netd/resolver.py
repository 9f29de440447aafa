"""Answers the DNS queries that guests send to the gateway of a Linux bridge of virtbus.

The resolver itself answers for names of VMs, and forwards other queries to the DNS servers of the
network or the host. A guest finds the VMs of its own namespace, of its networks that share names,
and of the namespaces that controllers open to it.

This module runs in the resolver's process (`resolver_process/`), which outlives netd.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Interface, IPv6Interface, ip_address

from virtbus.bus.runtime.recent import Recent
from virtbus.netd.core import dns_message
from virtbus.netd.core.dns_message import BadQueryError, DnsQuery
from virtbus.netd.core.guest_names import GuestNames, NamedVm
from virtbus.netd.core.query_limits import QueryLimits
from virtbus.netd.core.reach import Address, is_host
from virtbus.netd.core.resolver_messages import FoundName, Lookup, ResolverSite
from virtbus.netd.core.zone import Meaning, ReverseName, VmName, Zone, ZoneName
from virtbus.netd.edge.dns_forwarder import Forwarder
from virtbus.netd.edge.dns_server import DnsGuest, DnsServer
from virtbus.netd.edge.host_servers import HostServers
from virtbus.netd.fleet_names import FleetNames

log = logging.getLogger(__name__)

FORWARDERS = 256
"""Maximum number of kept forwarders, one for each list of servers."""


class Resolver:
    """Serves each VM from `put` to `remove`, within `running`."""

    def __init__(self, site: ResolverSite, fleet: FleetNames) -> None:
        gateway = IPv4Interface(site.gateway)
        network6 = IPv6Interface(site.gateway6).network if site.gateway6 else None
        self._zone = Zone(site.domain, gateway.network, network6)
        self._node = site.node
        fixed = tuple(ip_address(server) for server in site.servers)
        self._forwarder = Forwarder(HostServers(fixed, gateway.ip).addresses)
        self._of_networks: Recent[tuple[Address, ...], Forwarder] = Recent(FORWARDERS)
        self._server = DnsServer(gateway.ip, self._resolve)
        self._guests = GuestNames()
        self._fleet = fleet

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve names.

        Raises:
            OSError: another server has the port.
        """
        async with self._server.running():
            yield

    @property
    def vms(self) -> frozenset[str]:
        return self._guests.uids

    def put(self, vm: NamedVm) -> None:
        """Give the VM its name, and answer queries from its addresses. Idempotent."""
        for address in set(self._guests.remove(vm.uid)).difference(dict(vm.gateways)):
            self._server.stop(address)
        self._guests.put(vm)
        for address, gateway in vm.gateways:
            try:
                self._server.serve(address, gateway)
            except OSError as error:
                extra = {"code": "resolver_socket", "uid": vm.uid}
                log.warning("%s gets no answers to DNS queries: %s", address, error, extra=extra)

    def remove(self, uid: str) -> None:
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
        forwarder = self._forwarder_for(vm.servers_for(guest.address))
        return await forwarder.ask(message, tcp=tcp) or dns_message.failure(query)

    def _forwarder_for(self, servers: tuple[Address, ...]) -> Forwarder:
        if not servers:
            return self._forwarder
        known = self._of_networks.get(servers)
        if known is None:
            known = self._of_networks[servers] = Forwarder(lambda: servers)
        return known

    async def _known(
        self, vm: NamedVm, limits: QueryLimits, query: DnsQuery, meaning: Meaning
    ) -> bytes | None:
        """Return the answer of virtbus; None to forward a query for the address of no known VM."""
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
        here = self._guests.named(wanted.namespace, wanted.name)
        if here is not None and here.is_known_to(vm):
            return dns_message.positive(query, here.addresses_for(vm), self._zone.domain)
        found = await self._find(
            vm,
            limits,
            Lookup(vm.namespace, wanted.namespace, wanted.name, sharing=vm.sharing),
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
            if here is None or not here.is_known_to(vm):
                return dns_message.negative(query, wanted.authority, exists=False)
            name = self._zone.name_of(here.namespace, here.name)
            return dns_message.pointer(query, name, wanted.authority)
        if wanted.address.is_global:
            return None
        want = Lookup(vm.namespace, address=str(wanted.address), sharing=vm.sharing)
        found = await self._find(vm, limits, want)
        if found is None or not found.found:
            return None
        name = self._zone.name_of(found.namespace, found.name)
        return dns_message.pointer(query, name, wanted.authority)

    async def _find(self, vm: NamedVm, limits: QueryLimits, want: Lookup) -> FoundName | None:
        return await self._fleet.find(want, vm.uid, limits.may_look_up)

    def _reachable(self, found: FoundName) -> list[Address]:
        """Return the addresses that guests of this host can reach.

        Each host has its own built-in network, so guests here cannot reach built-in addresses of
        guests on other hosts.
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
