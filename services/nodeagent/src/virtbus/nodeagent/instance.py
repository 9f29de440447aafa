"""Takes and renews the node's instance key, which gives one agent the right to act for the node.

Everybody with the node's credentials can pull from the node's consumers. So an agent first takes
`$KV.st.<node>._instance` by compare-and-set, and verifies the key before each list of the watch. An
agent that may not take the key starts and ends no guests. Such an agent reports the reason until a
person decides which host runs the node.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from virtbus.bus.client.ports import Bus, Entry, EntryKind
from virtbus.bus.errors import BusError, ConflictError, FullError, UnavailableError
from virtbus.bus.runtime.process import notify
from virtbus.nodeagent.core.instance import InstanceAction, InstanceSignals, Me, judge, replaced
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.hosts import HostMarks, HostRecord, Instance, encode_twice, read_either
from virtbus.schemas.node import NodeRecord, NodeState
from virtbus.schemas.wire import encode, read

log = logging.getLogger(__name__)

RENEW_S = 60.0
"""Interval of renewals. Each renewal is a synced write."""
LOOK_S = 1.0
REFUSED_LOOK_S = 5.0
WAIT_REPORTED_S = 20.0
"""Time after which a wait is reported. After a reboot, a wait of 15 s is normal, because the
heartbeat of the last agent must expire."""
RIVAL_TTL_S = 60.0
QUIET_S = 5.0
"""Time without a heartbeat after which a holder counts as ended. The time is longer than the
interval of heartbeats, because a restarted bus has no heartbeats at first."""
STALE_READ_S = 0.2
WHY = (
    "node {node} is not run by this host: {why}. Nothing is started or ended here. If {other} is "
    "off for good: virtbus node takeover {node} --confirm HOW"
)


class Lives(Protocol):
    """Stores instance ids in the state folder, and the holder of the node in the run directory."""

    def remember(self, instance: str) -> None:
        """Store durably that a later instance of this folder may replace `instance`."""

    def disown(self) -> None:
        """Store durably that later instances of this folder may replace no earlier instance."""

    def tell(self, instance: str, why: str) -> None:
        """Write for local services the id of the node's holder, or why this agent does not hold it.

        `instance` is "" in the second case.
        """


class Ownership:
    """One instance of the agent, and the node's instance key.

    After a person has given the node to another host, `on_replaced` is called at each refusal.
    """

    def __init__(
        self,
        bus: Bus,
        node: str,
        me: Me,
        lives: Lives,
        hostname: str = "",
        on_replaced: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.me = me
        self.held = False
        self._bus = bus
        self._node = node
        self._lives = lives
        self._hostname = hostname
        self._on_replaced = on_replaced
        self._key = subjects.node_instance(node)
        self._since_ns = bus.sources.time_ns()
        self._revision = 0
        self._sent: set[str] = set()
        """The tokens of the last confirmed write, and of later writes with an unknown result."""
        self._quiet_since_s: float | None = None
        self._refused_s: float | None = None
        self._reported_why = ""

    # --- acquire ---------------------------------------------------------------------------------
    async def claim(self) -> None:
        self._lives.remember(self.me.instance)
        while True:
            try:
                step, why = await self._try()
                if step is InstanceAction.TAKE:
                    break
                await self._refused(step, why)
            except ConflictError:
                continue  # another agent has just written the key
            except BusError as error:
                log.warning(
                    "cannot take the node's key: %s", error, extra={"code": "instance_waits"}
                )
                step = InstanceAction.WAIT
            await asyncio.sleep(LOOK_S if step is InstanceAction.WAIT else REFUSED_LOOK_S)
        self._sent.clear()
        self.held = True
        self._lives.tell(self.me.instance, "")
        log.info("this host runs node %s", self._node, extra={"code": "instance_held"})

    async def _try(self) -> tuple[InstanceAction, str]:
        """Decide once about the key, and take the key if this agent may.

        Raises:
            ConflictError: the key changed after it was read.
        """
        entry = await self._bus.get(self._key)
        holder = self._holder(entry)
        if holder is not None and holder.token in self._sent:
            self._revision = entry.revision if entry else 0
            return InstanceAction.TAKE, ""
        step, why = judge(await self._signs(entry))
        if step is InstanceAction.TAKE:
            await self._write(entry.revision if entry else 0)
        return step, why

    async def _signs(self, entry: Entry | None) -> InstanceSignals:
        holder = self._holder(entry)
        return InstanceSignals(
            self.me,
            record=await self._host_record(),
            holder=holder,
            revision=entry.revision if entry else 0,
            heard=holder is not None and await self._heard(holder),
            holding=self.held,
        )

    def _holder(self, entry: Entry | None) -> Instance | None:
        """Return the key's value; None if the key has no value.

        If the value is unreadable or names another node, return an Instance with an empty id.
        """
        if entry is None or entry.kind is not EntryKind.PUT:
            return None
        with suppress(VirtbusError):
            holder = read_either(entry.value)
            if holder.node == self._node:
                return holder
        return Instance(node=self._node, instance="", host=HostMarks(key=""))

    async def _host_record(self) -> HostRecord | None:
        entry = await self._bus.get(subjects.node_host(self._node))
        if entry is None or entry.kind is not EntryKind.PUT:
            return None
        try:
            return read(HostRecord, entry.value)
        except VirtbusError as error:
            message = f"bad host record ({error}); `virtbus node approve {self._node}` repairs it"
            raise UnavailableError(message) from error

    async def _heard(self, holder: Instance) -> bool:
        """Return True if the holder may still run.

        Return False if its last heartbeat says LEFT, or if the node was silent for `QUIET_S`.
        """
        entry = await self._bus.get(subjects.node_record(self._node))
        now_s = asyncio.get_running_loop().time()
        if entry is not None and entry.kind is EntryKind.PUT:
            self._quiet_since_s = None
            with suppress(VirtbusError):
                last = read(NodeRecord, entry.value)
                return last.instance != holder.instance or last.state is not NodeState.LEFT
            return True
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        return now_s - self._quiet_since_s < QUIET_S

    async def _write(self, expect: int) -> None:
        """Write the key over revision `expect`; raises as `Bus.put`."""
        token = self._bus.sources.uuid7()
        self._sent.add(token)
        value = encode_twice(self._instance(token))
        self._revision = await self._bus.put(self._key, value, expect=expect)
        self._sent = {token}

    def _instance(self, token: str, why: str = "") -> Instance:
        return Instance(
            node=self._node,
            instance=self.me.instance,
            host=self.me.host,
            boot=self.me.boot,
            folder=self.me.folder,
            hostname=self._hostname,
            since_ns=self._since_ns,
            token=token,
            why=why,
        )

    # --- refused ---------------------------------------------------------------------------------
    async def _refused(self, step: InstanceAction, why: str) -> None:
        now_s = asyncio.get_running_loop().time()
        self._refused_s = now_s if self._refused_s is None else self._refused_s
        if step is InstanceAction.WAIT and now_s - self._refused_s < WAIT_REPORTED_S:
            return
        if why != self._reported_why:
            self._reported_why = why
            other = "the host that runs it"
            text = WHY.format(node=self._node, why=why, other=other)
            log.error("%s", text, extra={"code": "second_instance"})
            self._lives.tell("", text)
            notify(f"READY=1\nSTATUS={why}")
        if self._on_replaced is not None and replaced(self.me, await self._host_record()):
            await self._on_replaced()
        rival = encode(self._instance(self._bus.sources.uuid7(), why))
        await self._bus.put(subjects.node_rival(self._node), rival, ttl_s=RIVAL_TTL_S)

    # --- renew -----------------------------------------------------------------------------------
    async def keep(self) -> None:
        """Renew the key periodically, until cancelled.

        Raises:
            VirtbusError: 409 `second_instance`: another instance has the key.
        """
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self.prove()
            except BusError as error:
                log.info("cannot renew the node's key: %s", error, extra={"code": "instance_waits"})

    async def prove(self) -> None:
        """Write the key over this instance's last write, to prove that this instance holds the key.

        Raises:
            VirtbusError: 409 `second_instance`: another instance has the key.
            BusError: the result is unknown. The caller repeats the call.
        """
        while True:
            try:
                await self._write(self._revision)
            except (ConflictError, FullError):
                entry = await self._bus.get(self._key)
            else:
                return
            holder = self._holder(entry)
            if entry is not None and holder is not None and holder.token in self._sent:
                self._revision, self._sent = entry.revision, {holder.token}
                if entry.value == encode_twice(self._instance(holder.token)):
                    return
                await asyncio.sleep(STALE_READ_S)  # corrupt, and written again
            else:
                await self._again(entry, holder)

    async def _again(self, entry: Entry | None, holder: Instance | None) -> None:
        """Handle a changed key: the bus lost the last write, or another agent wrote the key."""
        if entry is not None and holder is not None and holder.instance == self.me.instance:
            # With another revision, a copy of this instance, with its id, wrote the key.
            if entry.revision != self._revision and await self._bus.get(self._key) == entry:
                self._lose(holder)
            await asyncio.sleep(STALE_READ_S)
            return
        signs = await self._signs(entry)
        step, _ = judge(signs)
        if step is not InstanceAction.TAKE:
            # An answer may be corrupt, so two must be equal.
            if await self._signs(await self._bus.get(self._key)) == signs:
                self._lose(holder)
            return
        if signs.damaged:
            log.error("unreadable %s: writing it again", self._key, extra={"code": "bad_record"})
        self._revision = entry.revision if entry else 0

    def _lose(self, holder: Instance | None) -> None:
        self.held = False
        self._lives.disown()
        other = holder.hostname if holder is not None and holder.hostname else "another host"
        message = f"node {self._node} is run by an agent of {other} now; this one ends"
        self._lives.tell("", message)
        raise VirtbusError(Code.CONFLICT, "second_instance", message)
