"""Caches the fleet's records, statuses, nodes and claims, as watches of the bus deliver them.

The cache may lag. Answers and placement use it, and a CAS write confirms each decision.
"""

import math
from dataclasses import dataclass, field

from virtbus.controller.core.allocations import NOTHING, Allocations
from virtbus.controller.core.given_addresses import GivenAddresses
from virtbus.controller.core.hosts import Hosts
from virtbus.controller.core.images import KnownImages
from virtbus.controller.core.networks import Networks
from virtbus.controller.core.nodes import (
    BRAKE_ALARM,
    DOWN_AFTER_S,
    LEFT_FOR_S,
    SUSPECT_AFTER_S,
    UNHEARD,
    NodeSeen,
    NodeSignals,
    brake,
    state_of,
    unset_spec,
)
from virtbus.controller.core.operations import Operations
from virtbus.controller.core.own_writes import OwnWrites
from virtbus.controller.core.placement import CPU_OVERCOMMIT, Candidate, kind_of, why_unplaced
from virtbus.controller.core.pools import KnownPools
from virtbus.controller.core.security_groups import SecurityGroups
from virtbus.controller.core.unreadable import Damaged
from virtbus.controller.core.unrecorded_vms import UnrecordedVms, held_alarms
from virtbus.controller.core.view import view
from virtbus.controller.core.vm_keys import StoredClaim, StoredVm, read_vm_key
from virtbus.controller.core.volume_placement import Wait, place_waiting, wait_of
from virtbus.controller.core.volumes import Volumes
from virtbus.schemas import subjects
from virtbus.schemas.address_claim import AddressClaim
from virtbus.schemas.equal_domains import EqualDomains
from virtbus.schemas.ids import UNPLACED, is_id
from virtbus.schemas.node import NodeRecord, NodeSpec, NodeState
from virtbus.schemas.records import as_stored, plain_stored, read_stored, refuse_foreign
from virtbus.schemas.vm import NameClaim, VmRecord
from virtbus.schemas.vm_status import VmStatus, VmView

PROOF_FRESH_S = 5.0
"""A lease renewal proves for this time that the bus is reachable. Without such a proof, the silence
of nodes does not grow."""
SILENT_FRESH_S = 0.25
"""The list of silent nodes is computed every 250 ms, because for 200 nodes it takes 2 ms."""
GONE_KEPT = 20_000
"""Number of deleted VMs that are remembered, because a resumed watch can still report them."""
REASON_FRESH_S = 1.0
REASONS_KEPT = 1000
OPEN = NodeSpec.model_construct(node=UNPLACED), 0


@dataclass
class Fleet:
    """The cached state of the fleet, with the logic that processes the messages of watches.

    `revision` and `status_revision` are the highest revisions since the last complete lists.
    Statuses are by node and uid. A node may write any status below its own prefix. So a status of
    a VM counts only while the VM's record is on the node that wrote it.
    """

    vcpus_per_cpu: float = CPU_OVERCOMMIT
    """Overcommit factor of a node's shared CPUs."""
    vms: dict[str, StoredVm] = field(default_factory=dict)
    """VMs by uid. Only `apply` and `drop_vm` write `vms`, so that `names` and `promises` match."""
    promises: Allocations = field(default_factory=Allocations)
    statuses: dict[tuple[str, str], tuple[VmStatus, int]] = field(default_factory=dict)
    holding: UnrecordedVms = field(default_factory=UnrecordedVms)
    nodes: dict[str, NodeSeen] = field(default_factory=dict)
    hosts: Hosts = field(default_factory=Hosts)
    images: KnownImages = field(default_factory=KnownImages)
    pools: KnownPools = field(default_factory=KnownPools)
    volumes: Volumes = field(default_factory=Volumes)
    networks: Networks = field(default_factory=Networks)
    groups: SecurityGroups = field(default_factory=SecurityGroups)
    addresses: GivenAddresses = field(default_factory=GivenAddresses)
    operations: Operations = field(default_factory=Operations)
    node_specs: dict[str, tuple[NodeSpec, int]] = field(default_factory=dict)
    """By node: its desired state, and the revision."""
    evacuating: set[str] = field(default_factory=set)
    """Uids of the VMs that leave their node."""
    names: dict[tuple[str, str], str] = field(default_factory=dict)
    claims: dict[str, StoredClaim] = field(default_factory=dict)
    unplaced: dict[str, None] = field(default_factory=dict)
    """Uids of VMs without a node."""
    refused: dict[str, None] = field(default_factory=dict)
    """Uids of VMs that a node has refused. The VM's status says if the refusal is still true."""
    moving: dict[str, int] = field(default_factory=dict)
    """By uid: the revision of a purge that begins a move. The record on the new node follows."""
    gone: dict[str, int] = field(default_factory=dict)
    """Deleted VMs: by uid, the revision of the purge."""
    forgotten_revision: int = 0
    """The highest revision of a delete that was dropped from `gone`."""
    revision: int = 0
    status_revision: int = 0
    quiet_since_s: float = 0.0
    """The loop's time when the bus last became reachable. Earlier silence does not count."""
    proved_s: float = math.inf
    """The loop's time of the last known lease renewal. See PROOF_FRESH_S."""
    damaged: Damaged = field(default_factory=Damaged)
    own_writes: OwnWrites = field(default_factory=OwnWrites)
    braked: bool = False
    """True while too many nodes are silent together: the controller then acts on none of them."""
    _candidates: dict[str, Candidate] = field(default_factory=dict)
    """By node: cached candidates. A change of a node or its VMs removes the node's candidate."""
    _domains: EqualDomains = field(default_factory=EqualDomains)
    _silent_s: float = -math.inf
    """The loop's time at which silent nodes were last computed."""
    _reasons: dict[Wait, tuple[float, str]] = field(default_factory=dict)

    # --- input from watches --------------------------------------------------------------------
    def put_vm(self, key: str, value: bytes, revision: int, time_ns: int) -> str | None:
        """Process one `$KV.vm` message; return the uid whose view changed, if any."""
        self.revision = max(self.revision, revision)
        held = self.vms.get(key.rpartition(".")[2])
        if held is not None and held.revision >= revision:
            return None  # our own write, which `apply` has processed
        if (tokens := key.split("."))[-1] == subjects.JOIN_KEY:
            self.hosts.joined.add(tokens[2])
        message = self.own_writes.record_of(key, value) or read_vm_key(key, value)
        if isinstance(message, NameClaim | AddressClaim):
            self.claims[key] = StoredClaim(message.uid, revision, time_ns)
            self.addresses.put(key)
            return None
        if isinstance(message, NodeSpec):
            refuse_foreign(key, is_id(message.node) and subjects.node_spec(message.node))
            self.node_spec(message, revision)
            return None
        if not isinstance(message, VmRecord):
            return None
        return message.uid if self.apply(StoredVm(message, revision)) else None

    def apply(self, held: StoredVm) -> bool:
        """Process a record; return False if a record of this or a higher revision is known."""
        record, known = held.record, self.vms.get(held.record.uid)
        if known is not None and known.revision >= held.revision:
            return False
        record = self._domains.shared(record)
        if known is not None:
            self.promises.take_back(known.record)
            self._candidates.pop(known.record.node, None)
        self.promises.add(record)
        self._candidates.pop(record.node, None)
        self.moving.pop(record.uid, None)
        self.refused.pop(record.uid, None)
        self.unplaced.pop(record.uid, None)
        if record.node == UNPLACED:
            self.unplaced[record.uid] = None
        self.vms[record.uid] = held._replace(record=record)
        self.names[record.namespace, record.name] = record.uid
        self.gone.pop(record.uid, None)
        # a VM that is being deleted is released without a move
        leaves = record.evacuating and not record.deleting
        (self.evacuating.add if leaves else self.evacuating.discard)(record.uid)
        return True

    def purge_vm(self, key: str, revision: int) -> str | None:
        """Process one purge marker of `$KV.vm`; return the uid if a VM was removed."""
        self.revision = max(self.revision, revision)
        if (tokens := key.split("."))[-1] == subjects.NODE_SPEC_KEY:
            self.node_spec(NodeSpec(node=tokens[2]), revision)
            return None
        if tokens[-1] == subjects.JOIN_KEY:
            self.drop_node(tokens[2])
            return None
        self.addresses.purge(key, revision)
        if self.claims.pop(key, None) is not None or len(tokens) != 4:
            return None
        uid = tokens[3]
        held = self.vms.get(uid)
        if held is not None and (held.revision > revision or held.record.node != tokens[2]):
            return None  # the purge of a move whose new record was processed already
        if held is not None and not held.record.deleting:
            self.moving[uid] = revision  # the new record of this move follows
            return None
        return self.drop_vm(uid, revision)

    def drop_moved(self, uid: str, revision: int) -> str | None:
        """Forget a VM if its record was purged at `revision` and no record has followed."""
        return self.drop_vm(uid, revision) if self.moving.get(uid) == revision else None

    def drop_vm(self, uid: str, revision: int) -> str | None:
        """Forget a VM; return its uid if it was known."""
        self.gone.pop(uid, None)
        self.gone[uid] = revision
        if len(self.gone) > GONE_KEPT:
            self.forgotten_revision = self.gone.pop(next(iter(self.gone)))
        self.evacuating.discard(uid)
        self.moving.pop(uid, None)
        self.refused.pop(uid, None)
        self.unplaced.pop(uid, None)
        held = self.vms.pop(uid, None)
        if held is None:
            return None
        self.promises.take_back(held.record)
        self._candidates.pop(held.record.node, None)
        if self.names.get(name := (held.record.namespace, held.record.name)) == uid:
            del self.names[name]
        return uid

    def node_spec(self, node_spec: NodeSpec, revision: int) -> None:
        """Store a node's desired state, unless a newer revision is known."""
        known = self.node_specs.get(node_spec.node)
        if known is None or known[1] < revision:
            self.node_specs[node_spec.node] = (node_spec, revision)
            self._candidates.pop(node_spec.node, None)

    def put_status(self, key: str, value: bytes, revision: int) -> str:
        """Process a status; return its VM's uid. Raise VirtbusError for a wrong key (BUS-04)."""
        self.status_revision = max(self.status_revision, revision)
        status = read_stored(VmStatus, key, value)
        refuse_foreign(key, is_id(status.node) and subjects.vm_status(status.node, status.uid))
        self.statuses[status.node, status.uid] = (status, revision)
        self.holding.note(status)
        if status.refused and status.uid in self.vms:
            self.refused[status.uid] = None
        return status.uid

    def purge_status(self, key: str, revision: int) -> str | None:
        """Process a status's purge marker; return the uid if the status was known."""
        self.status_revision = max(self.status_revision, revision)
        node, _, uid = key.removeprefix("$KV.st.").partition(".")
        self.holding.forget(node, uid)
        return uid if self.statuses.pop((node, uid), None) is not None else None

    def put_images(self, key: str, value: bytes) -> None:
        """Process the images of a node; raise VirtbusError if they do not match their key."""
        self._candidates.pop(self.images.put(key, value), None)

    def purge_images(self, key: str) -> None:
        """Forget a node's images."""
        self._candidates.pop(self.images.purge(key), None)

    def put_node(self, key: str, value: bytes, now_s: float, now_ns: int) -> str:
        """Process a heartbeat; return its node. Raise VirtbusError if the key is wrong."""
        record = as_stored(NodeRecord, plain := plain_stored(key, value))
        refuse_foreign(key, is_id(record.node) and subjects.node_record(record.node))
        skew_s = (record.time_ns - now_ns) / 1e9 if record.time_ns else 0.0
        vms = self.promises.on.get(record.node, NOTHING).vms
        self.nodes[record.node] = NodeSeen(record, now_s, skew_s, vms=vms)
        self.hosts.reported[record.node] = (record, plain)
        self.offer(record.node)
        return record.node

    def offer(self, node: str) -> None:
        """Limit a node's last heartbeat to the values that are approved now."""
        if seen := self.nodes.get(node):
            record, plain = self.hosts.offered(node)
            self.nodes[node] = seen._replace(record=record, kind=kind_of(plain))
        self._candidates.pop(node, None)

    def drop_node(self, node: str) -> None:
        """Forget a node because a user asked for it. The next heartbeat adds the node again."""
        self.hosts.joined.discard(node)
        self.nodes.pop(node, None)

    def forget_left(self, now_s: float) -> None:
        """Forget nodes that left some time ago. Their heartbeat keys expire without a message."""
        for node in [n for n, seen in self.nodes.items() if now_s - seen.heard_s > LEFT_FOR_S]:
            self.forget_node(node)

    def forget_node(self, node: str) -> None:
        """Process the end of a heartbeat: forget a node that left, without VMs and join record."""
        seen = self.nodes.get(node)
        kept = node in self.hosts.joined or node in self.promises.on
        if seen and seen.record.state is NodeState.LEFT and not kept:
            del self.nodes[node]

    def node_spec_of(self, node: str) -> NodeSpec:
        return self.node_specs[node][0] if node in self.node_specs else unset_spec(node)

    # --- answers --------------------------------------------------------------------------
    def silence_s(self, node: str, now_s: float) -> float:
        """Return how long a node has been silent while the bus was reachable."""
        seen = self.nodes.get(node)
        heard_s = seen.heard_s if seen else 0.0
        until_s = now_s if now_s - self.proved_s < PROOF_FRESH_S else self.proved_s
        return max(until_s - max(heard_s, self.quiet_since_s), 0.0)

    def node_state(self, node: str, now_s: float) -> NodeState:
        """Return the node's state; `_`, the pseudo node of unplaced VMs, is always ready."""
        if node == UNPLACED:
            return NodeState.READY
        seen = self.nodes.get(node)
        reported = seen.record.state if seen else NodeState.RECOVERING
        draining = node in self.node_specs and self.node_spec_of(node).draining is not None
        return state_of(NodeSignals(reported, self.silence_s(node, now_s), draining, self.braked))

    def silent(self, node: str, now_s: float) -> bool:
        """Return True if the node gets no VMs and the states of its VMs are unknown."""
        seen = self.nodes.get(node)
        # the fast path, because every create calls this for each node
        if seen and now_s - seen.heard_s <= SUSPECT_AFTER_S:
            return seen.record.state is NodeState.LEFT
        return self.node_state(node, now_s) in UNHEARD

    def may_be_off(self, node: str, now_s: float) -> bool:
        """Return True if the node may be off: it is silent, or reported that it left.

        The brake does not matter here, because a person may declare many nodes off.
        """
        seen = self.nodes.get(node)
        left = seen is not None and seen.record.state is NodeState.LEFT
        return left or self.silence_s(node, now_s) > DOWN_AFTER_S

    def known_nodes(self) -> list[str]:
        """Return the sorted names of nodes that sent a heartbeat, have joined, or have VMs."""
        return sorted({*self.nodes, *self.hosts.joined, *self.promises.on} - {UNPLACED})

    def has_node(self, node: str) -> bool:
        return node in self.nodes or node in self.hosts.joined or node in self.promises.on

    def alarms(self) -> tuple[str, ...]:
        """Return problems that need a person, one sentence each."""
        brake_alarm = (BRAKE_ALARM,) if self.braked else ()
        held = held_alarms(seen.record for seen in self.nodes.values())
        return (*brake_alarm, *held, *self.hosts.alarms(), *self.damaged.alarms())

    def must_brake(self, now_s: float) -> bool:
        """Return True if too many nodes fell silent together."""
        known = {node: self.nodes.get(node) for node in {*self.nodes, *self.unheard_nodes()}}
        there = {n: s for n, s in known.items() if not s or s.record.state is not NodeState.LEFT}
        silent = [s for node, s in there.items() if self.silence_s(node, now_s) > SUSPECT_AFTER_S]
        return brake([seen.heard_s if seen else 0.0 for seen in silent], len(there))

    def status_of(self, record: VmRecord) -> tuple[VmStatus, int] | None:
        """Return the status that the record's own node wrote last, and its revision."""
        return self.statuses.get((record.node, record.uid))

    def last_status(self, record: VmRecord) -> VmStatus | None:
        return self.statuses.get((record.node, record.uid), (None, 0))[0]

    def show(self, uid: str, now_s: float) -> VmView | None:
        """Return the VM as the API shows it."""
        return self.show_held(held, now_s) if (held := self.vms.get(uid)) else None

    def show_held(self, held: StoredVm, now_s: float) -> VmView:
        """Return the API's view of a record, which may be newer than the cached record."""
        seen = self.last_status(held.record)
        node = self.node_state(held.record.node, now_s)
        if node is NodeState.RECOVERING and held.record.node not in self.nodes:  # no heartbeat
            node = NodeState.READY
        fence = self.node_specs.get(held.record.node, OPEN)[0].fenced
        why = self._unplaced(held.record, now_s) if held.record.node == UNPLACED else ""
        return self.damaged.shown(view(held.record, held.revision, seen, node, fence, why))

    def _unplaced(self, record: VmRecord, now_s: float) -> str:
        """Return why an unplaced VM waits. VMs with equal needs share a text, cached for 1 s."""
        wait = wait_of(record, self.volumes)
        reason = self._reasons.get(wait)
        if reason is None or now_s - reason[0] > REASON_FRESH_S:
            if len(self._reasons) > REASONS_KEPT:
                self._reasons.clear()
            refused = place_waiting(record, wait, self.candidates(now_s)).refused
            unheard = {node: "is silent" for node in self.known_nodes() if node not in self.nodes}
            reason = self._reasons[wait] = (now_s, why_unplaced({**refused, **unheard}))
        return reason[1]

    def unheard_nodes(self) -> list[str]:
        """Return nodes with VMs and without a heartbeat, so that their capacity is unknown."""
        return sorted(self.promises.on.keys() - self.nodes.keys() - {UNPLACED})

    def candidates(self, now_s: float) -> list[Candidate]:
        """Return the nodes with their allocations, for placement."""
        known, fresh_s = self._candidates, now_s - SUSPECT_AFTER_S
        if now_s - self._silent_s > SILENT_FRESH_S:
            self._silent_s = now_s
            for node, seen in self.nodes.items():
                if seen.heard_s < fresh_s or (node in known and known[node].silent):
                    known.pop(node, None)
        for node in self.nodes:
            if node not in known:
                known[node] = self.candidate(node, now_s)
        return [known[node] for node in self.nodes]

    def candidate(self, node: str, now_s: float) -> Candidate:
        """Return one node of `nodes` with its allocations."""
        seen, images = self.nodes[node], self.images.of(node)
        load, spec = self.promises.on.get(node, NOTHING), self.node_specs.get(node, OPEN)[0]
        return Candidate(
            seen.record,
            load.vms,
            *load.counted(seen.record),
            self.silent(node, now_s),
            seen.kind + images.mark if seen.kind else b"",
            spec.closed,
            spec.fenced is not None,
            max(0, load.vms - seen.vms),
            load.reserved_vms > 0,
            self.vcpus_per_cpu,
            images.keys,
            self.pools.of(node),
        )
