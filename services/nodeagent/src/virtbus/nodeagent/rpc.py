"""Serves `node.<id>.rpc.agent.*`: inspect, guest agents, networks, and streams (`streams.py`)."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from virtbus.bus.client.owners import check_owner
from virtbus.bus.client.ports import Bus, Endpoint, Handler, Request, ServiceInfo
from virtbus.nodeagent.core.guest_answers import guest_info, named_disks
from virtbus.nodeagent.core.guest_ports import GuestPrograms
from virtbus.nodeagent.core.ports import Console
from virtbus.nodeagent.streams import GuestStreams, Streams
from virtbus.nodeagent.vm.actor import VmActor
from virtbus.schemas import subjects
from virtbus.schemas.counters import Counters, CountersAsk
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest import GuestAsk, GuestExec, GuestExecuted, GuestInfo
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.network_path import NetworkAsk, NetworkView
from virtbus.schemas.node_rpc import HeldResources, Inspect
from virtbus.schemas.version import VERSION
from virtbus.schemas.wire import validate

REQUESTS_AT_ONCE = 200
NETD_S = 3.0
"""Time limit of a request to netd."""


class AgentRpc:
    """The agent's RPC endpoints."""

    def __init__(
        self,
        bus: Bus,
        node: str,
        console: Console,
        agents: GuestPrograms | None = None,
        connections: GuestStreams | None = None,
    ) -> None:
        """Without `agents` and `connections`, guests are simulated."""
        self._bus = bus
        self._node = node
        self._streams = Streams(
            bus, node, console, connections, self._interfaces, check_here=self.check_here
        )
        self._agents = agents
        self._guests: Mapping[str, VmActor] = {}
        self._recovering: Callable[[], bool] = lambda: True

    @asynccontextmanager
    async def serve(
        self,
        guests: Mapping[str, VmActor],
        more: Sequence[Endpoint] = (),
        recovering: Callable[[], bool] = lambda: False,
    ) -> AsyncIterator[None]:
        """Serve while the context is open.

        `guests` is the agent's own map of uid to actor, and changes. `more` are further endpoints.
        `recovering` returns True until the first list of records is complete.
        """
        self._guests = guests
        self._recovering = recovering
        info = ServiceInfo("virtbus-nodeagent", VERSION, "domains", {"node": self._node})
        handlers: dict[str, Handler] = {
            "inspect": self._inspect,
            "guest": self._guest,
            "exec": self._exec,
            "counters": self._counters,
            "network": self._network,
        }
        endpoints = [
            Endpoint(
                f"agent-{verb}",
                subjects.rpc(self._node, "agent", verb),
                handler,
                limit=REQUESTS_AT_ONCE,
                backlog=0,
            )
            for verb, handler in handlers.items()
        ]
        async with self._bus.serve(info, [*endpoints, *self._streams.endpoints(), *more]):
            yield

    async def _inspect(self, request: Request) -> HeldResources:
        want = validate(Inspect, request.data)
        return HeldResources(
            things={
                uid: (str(guest.vm.phase),)
                for uid, guest in self._guests.items()
                if want.uid in {None, uid}
            }
        )

    def check_here(self, uid: str, account: str = "") -> None:
        """Raise VirtbusError if `account` may not use the VM here.

        404: the VM is not on this node. 503: the node does not know yet if the VM is here. 403:
        another bridge owns the VM.
        """
        if uid not in self._guests and self._recovering():
            message = f"node {self._node} compares its host with the records; repeat in a moment"
            raise VirtbusError(Code.UNAVAILABLE, "recovering", message, after_ms=500)
        if uid not in self._guests:
            message = f"VM {uid} is not on node {self._node}; `virtbus vm get` shows where it is"
            raise VirtbusError(Code.NOT_FOUND, "vm_not_here", message)
        check_owner(account, self._guests[uid].vm.record.owner)

    def _interfaces(self, uid: str) -> Sequence[InterfaceStatus]:
        net = self._guests[uid].vm.net.latest
        return net.interfaces if net else ()

    async def _guest(self, request: Request) -> GuestInfo:
        want = validate(GuestAsk, request.data)
        self.check_here(want.uid, request.account)
        vm = self._guests[want.uid].vm  # the VM may leave while its guest is asked
        answers = await self._real_agents().ask(want.uid, want.about, timeout_s=want.timeout_s)
        info = guest_info(answers)
        return named_disks(info, answers, vm.record, vm.observed.disks.addresses)

    async def _exec(self, request: Request) -> GuestExecuted:
        want = validate(GuestExec, request.data)
        self.check_here(want.uid, request.account)
        return await self._real_agents().execute(want.uid, want.words, timeout_s=want.timeout_s)

    def _real_agents(self) -> GuestPrograms:
        if self._agents is None:
            message = f"the guests of node {self._node} are simulated: they have no guest agent"
            raise VirtbusError(Code.UNSUPPORTED, "guest_simulated", message)
        return self._agents

    async def _counters(self, request: Request) -> Counters:
        want = validate(CountersAsk, request.data)
        self.check_here(want.uid, request.account)
        subject = subjects.rpc(self._node, "netd", "traffic")
        return validate(Counters, await self._bus.request(subject, want, timeout_s=NETD_S))

    async def _network(self, request: Request) -> NetworkView:
        want = validate(NetworkAsk, request.data)
        self.check_here(want.uid, request.account)
        subject = subjects.rpc(self._node, "netd", "path")
        return validate(NetworkView, await self._bus.request(subject, want, timeout_s=NETD_S))
