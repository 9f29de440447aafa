"""Creates VMs: admission, placement, and the commit on the chosen node."""

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from virtbus.bus.client import tracing
from virtbus.bus.client.endpoints import in_time
from virtbus.bus.client.owners import check_owner, node_of, owner_of
from virtbus.bus.client.ports import Bus, EntryKind, Request
from virtbus.bus.errors import ConflictError
from virtbus.controller.core import bare_vms, mutations
from virtbus.controller.core.admission import AdmittedVm, admit
from virtbus.controller.core.claims import AddressTakenError, addresses_of, uid_taken
from virtbus.controller.core.clones import origin_of, taken_over
from virtbus.controller.core.demand import demand_of_vm
from virtbus.controller.core.directories import check_directories
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.input_sizes import refuse_large
from virtbus.controller.core.network_access import check_networks, refuse_unknown
from virtbus.controller.core.network_fit import refuse_misfits
from virtbus.controller.core.placement import impossible
from virtbus.controller.core.quotas import Quota
from virtbus.controller.core.runtime_nodes import check_devices, check_selector
from virtbus.controller.core.secret_inputs import secret_bytes
from virtbus.controller.core.snapshot_changes import not_found
from virtbus.controller.core.vm_keys import StoredVm
from virtbus.controller.core.volume_holds import wanted_volumes
from virtbus.controller.core.volume_placement import Home, near, place_near
from virtbus.controller.edge.address_claims import AddressClaims
from virtbus.controller.edge.bus_storage import BusStorageGuard
from virtbus.controller.edge.cas import ATTEMPTS, contended
from virtbus.controller.edge.commit import Commits, Committed
from virtbus.controller.edge.fleet_events import FleetEvents
from virtbus.controller.edge.image_names import ImageNameReads
from virtbus.controller.edge.living_volumes import LivingVolumes
from virtbus.controller.edge.network_targets import COMMIT_MOST_S, NetworkTargets
from virtbus.controller.edge.reservations import NodeFullError
from virtbus.controller.edge.seed_updates import secrets_of
from virtbus.controller.edge.snapshot_writes import SnapshotWrites
from virtbus.controller.edge.volume_holders import VolumeHolders
from virtbus.controller.edge.volume_templates import VolumeTemplates
from virtbus.controller.edge.watch_server import WatchServer
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.snapshot_api import SnapshotAsk
from virtbus.schemas.vm import Overcommit, VmRecord
from virtbus.schemas.volume import VolumeRecord

log = logging.getLogger(__name__)

NODES_TRIED = 8
"""Limit of nodes that are tried for a VM with reserved resources, before the VM waits without a
node. Each full node costs a round trip."""


class CreateRules(NamedTuple):
    """The rules for creates. With `strict`, all VMs except those of kubelet reserve resources."""

    addresses: Quota
    templates: VolumeTemplates
    living: LivingVolumes
    strict: bool = False


class VmCreates:
    """Creates VMs. If several controllers create the same VM concurrently, one commits."""

    def __init__(
        self,
        bus: Bus,
        fleet: Fleet,
        watches: WatchServer,
        events: FleetEvents,
        storage: BusStorageGuard,
        rules: CreateRules,
    ) -> None:
        self._fleet = fleet
        self._watches = watches
        self._events = events
        self._commits = Commits(bus, fleet)
        self._storage = storage
        self._bus = bus
        self._templates = rules.templates
        self._snapshots = SnapshotWrites(bus)
        self._images = ImageNameReads(bus, fleet)
        self._networks = NetworkTargets(bus, fleet, events)
        self.addresses = AddressClaims(bus, fleet, rules.addresses, rules.living.claims)
        self._all_strict = rules.strict

    async def create(self, request: Request) -> tuple[Committed, tuple[Detail, ...]]:
        """Admit, place and commit a VM; return the VM and warnings.

        Raises VirtbusError, BusError.
        """
        admitted = admit(request.data, self._bus.sources.uuid7())
        self._check_home(node_of(request.account), admitted)
        with tracing.span("virtbus create vm", uid=admitted.uid, parent=request.traceparent):
            until_s = asyncio.get_running_loop().time() + COMMIT_MOST_S
            record = await self._with_images(self._record(admitted, request.account))
            if (bare := await self._bare(record)) is not None:
                return await self._complete(bare, record, admitted), admitted.warnings
            record = await self._with_networks(record)
            holders = await self._templates.holders(record, request.account)
            record, home = await self._with_volumes(record, holders)
            if admitted.origin is not None and self._fleet.vms.get(admitted.uid) is None:
                record, home, admitted = await self._of_origin(record, home, admitted, request)
            refuse_large(record, admitted.secrets, spec_bytes=admitted.spec_bytes)
            known = self._fleet.vms.get(admitted.uid)
            if known is None:
                self._storage.refuse_create()
                self._refuse_held(admitted.uid)
            nodes, why = (
                self._choose(record, admitted, home)
                if known is None
                else ((known.record.node,), "")
            )
            # no commit after the deadline: another controller may have answered a repeat
            deadline_s = min(request.deadline_s, until_s) if record.network_targets else None
            async with in_time(deadline_s or request.deadline_s):
                committed = await self._commit(record, nodes, admitted, holders)
            await self._keep_networks(committed)
            check_owner(request.account, committed.held.record.owner)
            if self._fleet.apply(committed.held):  # before the watch delivers it
                self._watches.changed(committed.held.record.uid)
            self._tell_created(committed, why, holders.made)
        return committed, admitted.warnings

    def _check_home(self, node: str, admitted: AdmittedVm) -> None:
        """Raise 403 if the container runtime of `node` would create a VM on another node.

        `node` is "" for accounts that are no container runtime. For these, raise 403 for a VM with
        devices of a node.
        """
        check_devices(node, admitted.spec)
        seen = self._fleet.nodes.get(node)
        labels = seen.record.labels if seen is not None else {}
        check_selector(node, labels, admitted.spec.node_selector)

    async def _with_images(self, record: VmRecord) -> VmRecord:
        """Return the record with the current targets of its image names."""
        targets = await self._images.of_spec(record.spec, record.namespace)
        return record.model_copy(update={"image_targets": targets}) if targets else record

    async def with_new_images(self, record: VmRecord, before: VmRecord) -> VmRecord:
        """Add the targets of new image names to a changed record; raises as `with_targets`."""
        had = {volume.image_ref for volume in before.spec.volumes}
        new = tuple(one for one in record.spec.volumes if one.image_ref not in had)
        if not new:
            return record
        spec = record.spec.model_copy(update={"volumes": new})
        found = await self._images.of_spec(spec, record.namespace)
        return mutations.with_targets(record, before, found)

    async def _bare(self, record: VmRecord) -> StoredVm | None:
        """Return the VM without disks to which this create adds disks, or None (ADR 0059)."""
        held = await self._commits.latest(record.uid) if bare_vms.brings_disks(record) else None
        return held if held is not None and bare_vms.is_bare(held.record) else None

    async def _complete(self, bare: StoredVm, wanted: VmRecord, admitted: AdmittedVm) -> Committed:
        """Add the disks to a VM; raises VirtbusError 409 `uid_taken` if the uid is another VM's.

        If two such creates race, one of them gets 503 `contended`.
        """
        record = bare_vms.completed(bare.record, wanted)
        if record is None:
            raise uid_taken(wanted, bare.record)
        holders = await self._templates.holders(record, record.owner)
        refs, _home = await holders.resolve(record)
        body = secret_bytes(admitted.secrets) if admitted.secrets is not None else b""
        digest = hashlib.sha256(body).hexdigest() if body else None
        record = record.model_copy(update={"volume_refs": refs, "sec_digest": digest})
        refuse_large(record, admitted.secrets, spec_bytes=admitted.spec_bytes)
        try:
            if body:
                bare = await self._with_secrets(bare, body)
            held = await Commits(self._bus, self._fleet, holders).replace(bare, record)
        except ConflictError:
            raise contended("this uid") from None
        if self._fleet.apply(held):
            self._watches.changed(record.uid)
        self._tell_made(held, holders.made)
        self._events.emit(EventKind.VM_UPDATED, record, "its disks", revision=held.revision)
        return Committed(held, created=False)

    async def _with_secrets(self, bare: StoredVm, body: bytes) -> StoredVm:
        """Store the secrets of a second create, before its record; return the bare VM.

        Other stored secrets may belong to a concurrent create. In this case the bare VM is first
        written unchanged, so that the record of the concurrent create conflicts.

        Raises ConflictError if the VM or its secrets changed meanwhile.
        """
        key = subjects.vm_secret(bare.record.node, bare.record.uid)
        there = await self._bus.get(key)
        if there is not None and there.kind is EntryKind.PUT and there.value != body:
            bare = await self._commits.replace(bare, bare.record)
        await self._bus.put(key, body, expect=there.revision if there is not None else 0)
        return bare

    async def _with_networks(self, record: VmRecord) -> VmRecord:
        """Return the record with the network objects that its spec names."""
        targets = await self._networks.of_spec(record.spec, record.namespace)
        refuse_misfits(record.spec, targets)
        return record.model_copy(update={"network_targets": targets}) if targets else record

    async def _keep_networks(self, committed: Committed) -> None:
        """Take back the delete marks that a new VM's networks got during the create (ADR 0055).

        If a network was removed during the create, delete the VM, and raise 409.
        """
        record = committed.held.record
        if not committed.created or not record.network_targets:
            return
        try:
            await self._networks.keep(record)
        except VirtbusError:
            ending = mutations.deleting(record, grace_s=0)
            with suppress(ConflictError):  # a later change of the VM stays
                self._fleet.apply(await self._commits.replace(committed.held, ending))
            raise

    async def _with_volumes(
        self, record: VmRecord, holders: VolumeHolders
    ) -> tuple[VmRecord, Home | None]:
        """Return the record with the volumes that its spec names, and the volumes' home."""
        if not wanted_volumes(record.spec):
            return record, None
        known = self._fleet.vms.get(record.uid)
        if known is not None:  # a repeat: the VM has the volumes of the known record
            return record.model_copy(update={"volume_refs": known.record.volume_refs}), None
        refs, home = await holders.resolve(record)
        return record.model_copy(update={"volume_refs": refs}), home

    async def _of_origin(
        self, record: VmRecord, home: Home | None, admitted: AdmittedVm, request: Request
    ) -> tuple[VmRecord, Home, AdmittedVm]:
        """Return the record of a clone, its home, and the request with its source's secrets.

        The source is the VM whose snapshot the clone starts from.
        """
        ask = SnapshotAsk(name=admitted.origin or "", namespace=admitted.namespace)
        held = await self._snapshots.latest(ask.namespace, ask.name)
        if held is None:
            raise not_found(ask)
        check_owner(request.account, held.record.owner)
        origin = origin_of(held.record, home)
        source = self._fleet.vms.get(held.record.source_uid)
        if source is not None and source.record.sec_digest is not None:
            secrets = await secrets_of(self._bus, source.record)
            more = (admitted.secrets, source.record, secrets, admitted.name, admitted.uid)
            admitted = admitted._replace(secrets=taken_over(admitted.spec, *more))
        record = record.model_copy(update={"origin": origin})
        near_it = home or Home("", "")
        home = near_it._replace(node=origin.node, volume=origin.snapshot.name)
        return record, home, admitted

    def _refuse_held(self, uid: str) -> None:
        """Raise 409 if a node holds a VM of that uid whose record the bus has lost (I1)."""
        node = self._fleet.holding.node_of(uid)
        if node:
            message = (
                f"{node} holds VM {uid}, whose record the bus has lost; `virtbus bus rebuild` or "
                f"`virtbus node quarantine adopt {node} {uid}` writes it back"
            )
            raise VirtbusError(Code.CONFLICT, "held_on_node", message, after_ms=10_000)

    async def _commit(
        self,
        record: VmRecord,
        nodes: Sequence[str],
        admitted: AdmittedVm,
        holders: VolumeHolders,
    ) -> Committed:
        """Claim addresses, and commit the VM; after a refusal, release the claims.

        If another VM has taken a chosen address before the commit, choose another address.
        """
        commits = Commits(self._bus, self._fleet, holders)
        known = self._fleet.vms.get(record.uid)
        if known is not None:  # a repeat: the VM has the addresses of the known record
            claims = known.record.address_claims
            claimed = record.model_copy(update={"address_claims": claims})
            return await self._place(claimed, nodes, admitted, commits)
        for _ in range(ATTEMPTS):
            claimed = await self.addresses.claim(record)
            try:
                return await self._place(claimed, nodes, admitted, commits)
            except AddressTakenError as error:
                await self.addresses.give_back(claimed)
                if error.named:
                    raise
            except VirtbusError:
                await self.addresses.give_back(claimed)
                raise
        raise contended("an address of these networks")

    async def _place(
        self, record: VmRecord, nodes: Sequence[str], admitted: AdmittedVm, commits: Commits
    ) -> Committed:
        """Commit the VM on the first node with room; without any, commit it without a node."""
        claimed = addresses_of(record)
        for node in nodes[:NODES_TRIED]:
            try:
                there = record.model_copy(update={"node": node})
                return await commits.create(there, admitted.secrets, claimed)
            except NodeFullError as error:
                log.debug("%s: %s", record.name, error)
        waits = record.model_copy(update={"node": UNPLACED})
        return await commits.create(waits, admitted.secrets, claimed)

    def _strict(self, admitted: AdmittedVm) -> bool:
        """Return True if the VM or this controller's settings request reserved resources."""
        rules = admitted.spec.placement
        return self._all_strict or (rules is not None and rules.overcommit is Overcommit.STRICT)

    def _record(self, admitted: AdmittedVm, account: str) -> VmRecord:
        return VmRecord(
            uid=admitted.uid,
            namespace=admitted.namespace,
            name=admitted.name,
            labels=admitted.labels,
            annotations=admitted.annotations,
            spec=admitted.spec,
            spec_hash=admitted.spec_hash,
            node=UNPLACED,
            created_ns=self._bus.sources.time_ns(),
            powered=admitted.powered,
            paused=admitted.powered and mutations.starts_paused(admitted.spec),
            reserved=self._strict(admitted) and not node_of(account),  # kubelet reserves for pods
            owner=owner_of(account),
            traceparent=tracing.current_traceparent(),
        )

    def _choose(
        self, record: VmRecord, admitted: AdmittedVm, home: Home | None
    ) -> tuple[Sequence[str], str]:
        """Return the nodes that have room for the VM, the best first, and a text for the event.

        For a VM that is not `reserved`, the list has at most the best node.

        Raises:
            VirtbusError: 422: no node could ever run the VM. Also the errors of `check_networks`,
                `check_directories` and `refuse_unknown`.
        """
        spec, strict = admitted.spec, record.reserved
        nodes = self._fleet.candidates(asyncio.get_running_loop().time())
        targets, unheard = record.network_targets, self._fleet.unheard_nodes()
        offers = [node.record for node in nodes]
        check_networks(spec, admitted.namespace, offers, targets)
        if not node_of(record.owner):  # kubelet decides about the pods of its node
            check_directories(spec, admitted.namespace, offers)
        refuse_unknown(spec, offers, targets, unheard)
        powered, want = admitted.powered or strict, demand_of_vm(record)
        placement = place_near(spec, nodes, home, powered=powered, strict=strict, want=want)
        if not placement.fit and not unheard:
            refusal = impossible(want, near(nodes, home), strict=strict)
            if refusal is not None:
                raise refusal
        best = placement.nodes if strict else placement.best
        return best, f"best of {len(placement.fit)}, {len(placement.refused)} refused"

    def _tell_created(
        self, committed: Committed, why: str, made: Mapping[str, VolumeRecord]
    ) -> None:
        record = committed.held.record
        if not committed.created:
            return
        self._tell_made(committed.held, made)
        self._events.emit(EventKind.VM_ACCEPTED, record, f"{record.namespace}/{record.name}")
        if record.node != UNPLACED:
            self._events.emit(EventKind.VM_SCHEDULED, record, f"on {record.node}: {why}")
        extra = {"code": "vm_accepted", "uid": record.uid}
        log.info("accepted %s/%s on %s", record.namespace, record.name, record.node, extra=extra)

    def _tell_made(self, held: StoredVm, made: Mapping[str, VolumeRecord]) -> None:
        for volume in made.values():
            message = f"{volume.namespace}/{volume.name}, of {held.record.name}"
            self._events.named(EventKind.VOLUME_CREATED, volume, held.revision, message)
