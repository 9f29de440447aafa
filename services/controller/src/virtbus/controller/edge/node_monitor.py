"""Updates the states of nodes each second, and emits events of changes.

Each controller monitors nodes for its own answers; only the leader emits events.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from virtbus.bus.client.ports import Bus
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.nodes import BRAKE_ALARM
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.lease import LeaderTerm, Leases
from virtbus.controller.edge.watch_server import WatchServer
from virtbus.schemas.events import EventKind
from virtbus.schemas.node import NodeState

log = logging.getLogger(__name__)

PULSE_S = 1.0
STALL_S = 2.0
"""A check that is later than this shows that the process was suspended: heartbeats may be unread.
"""
RECENT_S = 60.0
"""A new leader also emits changes up to this age: there may have been no leader at that time."""

EVENTS: dict[NodeState, tuple[EventKind, str]] = {
    NodeState.READY: (EventKind.NODE_READY, "takes VMs"),
    NodeState.SUSPECT: (EventKind.NODE_SUSPECT, "has not been heard for 10 s"),
    NodeState.DOWN: (
        EventKind.NODE_DOWN,
        "has not been heard for 25 s; nothing is started elsewhere",
    ),
    NodeState.LEFT: (EventKind.NODE_LEFT, "its agent was stopped; its guests keep running"),
}


class Change(NamedTuple):
    """A change of a node's state; all controllers give the same change the same `identity`."""

    node: str
    state: NodeState
    at_s: float
    identity: str


class NodeMonitor:
    """Updates state that changes with time, without a message."""

    def __init__(
        self, bus: Bus, fleet: Fleet, watches: WatchServer, events: FleetEvents, leases: Leases
    ) -> None:
        self._bus = bus
        self._fleet = fleet
        self._watches = watches
        self._events = events
        self._leases = leases
        self._states: dict[str, NodeState] | None = None
        self._recent: deque[Change] = deque(maxlen=1000)
        self._changed = asyncio.Event()
        self._beat_s = 0.0
        self.listeners: list[Callable[[], None]] = []
        """Functions that are called after the state of a node has changed."""

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._beat_s = loop.time()
        while True:
            now_s = loop.time()
            stalled = now_s - self._beat_s > PULSE_S + STALL_S
            if stalled or not self._bus.connected:
                self._fleet.quiet_since_s = now_s
            self._beat_s = now_s
            self._fleet.proved_s = self._leases.proved_s
            self.beat(now_s)
            await asyncio.sleep(PULSE_S)

    def beat(self, now_s: float) -> None:
        fleet = self._fleet
        fleet.forget_left(now_s)
        fleet.hosts.forget_old(now_s)
        braked = fleet.must_brake(now_s)
        if braked != fleet.braked:
            fleet.braked = braked
            if braked:
                log.error(BRAKE_ALARM, extra={"code": "node_brake"})
        states = {node: fleet.node_state(node, now_s) for node in fleet.known_nodes()}
        before = states if self._states is None else self._states
        changed = {node for node, state in states.items() if before.get(node) is not state}
        for node in sorted(changed):
            self._note(node, states[node], now_s)
        self._states = states
        if changed:
            for uid, held in fleet.vms.items():
                if held.record.node in changed:
                    self._watches.changed(uid)
            for listener in self.listeners:
                listener()

    def _note(self, node: str, state: NodeState, now_s: float) -> None:
        seen = self._fleet.nodes.get(node)
        identity = f"{seen.record.instance}:{seen.record.time_ns}" if seen else "unheard"
        level = logging.WARNING if state is NodeState.DOWN else logging.INFO
        log.log(level, "%s is %s", node, state, extra={"code": f"node_{state}", "node": node})
        self._recent.append(Change(node, state, now_s, identity))
        self._changed.set()

    async def tell(self, tenure: LeaderTerm) -> None:
        """Emit changes as events, while the fleet lease is held."""
        while True:
            now_s = asyncio.get_running_loop().time()
            tenure.check()
            while self._recent:
                change = self._recent.popleft()
                event = EVENTS.get(change.state)
                if event is not None and now_s - change.at_s < RECENT_S:
                    kind, message = event
                    self._events.node(kind, change.node, message, change.identity)
            self._changed.clear()
            await self._changed.wait()
