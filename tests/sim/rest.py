"""Checks after all faults are healed and time has passed: I2, I3, I5, I8, I13."""

from collections.abc import Iterator

from tests.sim.observer import Observer, Wanted

from virtbus.bus.client.ports import EntryKind
from virtbus.nodeagent.core.ports import DomainState
from virtbus.schemas import subjects
from virtbus.schemas.node import NodeRecord, Reserved
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import NameClaim, VmRecord
from virtbus.schemas.vm_status import VmStatus
from virtbus.schemas.wire import read

OFF = frozenset({VmState.STOPPED, VmState.SUCCEEDED})


def at_rest(observer: Observer) -> Iterator[tuple[str, str]]:
    """Yield every violated invariant, with its evidence."""
    for wanted in observer.wanted.values():
        if wanted.delete_accepted or observer.vms.get(wanted.uid) is None:
            continue
        if wanted.accepted or observer.vms[wanted.uid].record is not None:
            yield from _lives(observer, wanted)
    yield from _leaks(observer)
    yield from _told(observer)
    yield from _unique(observer)
    yield from _reserved(observer)
    yield from observer.volumes.at_rest()
    yield from observer.volumes.at_rest_in_guests()
    yield from observer.snapshots.at_rest()
    yield from observer.operations.at_rest()
    yield from observer.backups.at_rest()
    yield from observer.addresses.at_rest()
    yield from observer.groups.at_rest()


def _lives(observer: Observer, wanted: Wanted) -> Iterator[tuple[str, str]]:
    """An accepted VM exists and has its requested state."""
    seen = observer.vms[wanted.uid]
    record = seen.record
    if record is None:
        if wanted.accepted and not wanted.delete_asked:
            yield "I2", f"{wanted.uid} was accepted and has no record"
        return
    if record.generation < wanted.generation or record.power_epoch < wanted.power_epoch:
        yield "I2", f"{wanted.uid}: an accepted change is not in the record"
    moved_off = not record.powered and seen.moved_off == record.power_epoch
    known = not wanted.in_doubt and wanted.powered is not None and not moved_off
    if known and wanted.paused is not None and record.paused != wanted.paused:
        yield "I2", f"{wanted.uid}: asked to be paused: {wanted.paused}, its record differs"
    if known and record.powered != wanted.powered:
        yield "I2", f"{wanted.uid}: asked to be {wanted.powered}, its record says {record.powered}"
    if record.deleting:
        yield "I8", f"{wanted.uid} is still being deleted"
        return
    if record.node == "_":
        yield from _unplaced(observer, record)
        return
    yield from _converged(observer, record, wanted)


def _unplaced(observer: Observer, record: VmRecord) -> Iterator[tuple[str, str]]:
    """A VM waits for capacity only if a single node has its volumes."""
    if not observer.volumes.home(record):
        yield "I8", f"{record.uid} is not placed"


def _converged(observer: Observer, record: VmRecord, wanted: Wanted) -> Iterator[tuple[str, str]]:
    uid, host = record.uid, observer.hosts[record.node]
    domain = host.domains.get(uid)
    active = domain is not None and domain.active
    if empty := observer.volumes.without_content(record):
        if domain is not None and active and not empty.isdisjoint(domain.volumes.values()):
            yield "I1", f"{uid} runs, and its volume has no content"
        return
    if domain is not None and domain.active and domain.metadata is not None:
        yield from _followed(record, domain.state, domain.metadata.power_epoch)
    entry = observer.server.shelf("$KV.st.x").entries.get(subjects.vm_status(record.node, uid))
    status = read(VmStatus, entry.value) if entry is not None and entry.value else None
    if status is None:
        yield "I8", f"{uid} has no status"
        return
    if status.epoch != record.epoch or status.generation != record.generation:
        yield "I8", f"{uid}: its status is of {status.epoch}/{status.generation}"
    if (status.power_epoch, status.pause_epoch) != (record.power_epoch, record.pause_epoch):
        yield "I8", f"{uid}: its status has not caught up with {record.power_epoch}"
    yield from _state(record, wanted, status, active=active)


def _followed(record: VmRecord, state: DomainState, started_for: int) -> Iterator[tuple[str, str]]:
    """A guest from before a restart is gone, and a paused one has stopped CPUs."""
    if started_for < record.restart_epoch:
        yield "I8", f"{record.uid} runs since {started_for}, before {record.restart_epoch}"
    if record.powered and (state is DomainState.PAUSED) != record.paused:
        yield "I8", f"{record.uid} is {state}, asked to be paused: {record.paused}"


def _state(
    record: VmRecord, wanted: Wanted, status: VmStatus, *, active: bool
) -> Iterator[tuple[str, str]]:
    """The reported state equals the desired and the actual state."""
    told = f"{record.uid} is {status.state} ({status.reason} {status.message}), active: {active}"
    if _may_rest(wanted.strategy, status):
        if active:
            yield "I9", told
    elif record.powered:
        state = VmState.PAUSED if record.paused else VmState.RUNNING
        if status.state is not state or not active:
            yield "I8", f"it should be {state}: {told}"
    elif status.state not in OFF or active:
        yield "I8", f"it should not run: {told}"


def _may_rest(strategy: str, status: VmStatus) -> bool:
    """A guest that ended by itself stays ended, with its reason, if its strategy says so."""
    if strategy == "Always":
        return False
    crashed = status.state is VmState.FAILED and status.ended
    return status.state in OFF or (crashed and strategy != "RerunOnFailure")


def _leaks(observer: Observer) -> Iterator[tuple[str, str]]:
    """Nothing exists of a VM that is deleted or elsewhere (I3, I5)."""
    live = {uid: seen.record for uid, seen in observer.vms.items() if seen.record is not None}
    for host in [host for host in observer.hosts.values() if not host.copied]:
        for what, held in (
            ("domain", host.domains),
            ("disks", host.disk.overlays),
            ("network", host.networks),
            ("record", host.disk.records),
            ("seed", host.disk.seeds),
        ):
            for uid in held:
                record = live.get(uid)
                if record is None or record.node != host.name:
                    yield "I5", f"{host.name} holds the {what} of {uid}, which is not there"
    for prefix in ("$KV.st.", "$KV.sec."):
        for key in [key for key in observer.entries(prefix) if "._" not in key]:
            node, uid = key.split(".")[2:4]
            record = live.get(uid)
            of_vm = uid not in {subjects.IMAGES_KEY, subjects.POOLS_KEY}
            if of_vm and (record is None or record.node != node):
                yield "I5", f"{key} is left on the bus"
    yield from _claims(observer, live)


def _told(observer: Observer) -> Iterator[tuple[str, str]]:
    """Quarantined data is no leak, because it is reported (I5)."""
    for host in observer.hosts.values():
        kept = len(host.disk.quarantine)
        entry = observer.server.shelf("$KV.node.x").entries.get(subjects.node_record(host.name))
        told = read(NodeRecord, entry.value).quarantined if entry is not None and entry.value else 0
        if host.up and kept != told:
            yield "I5", f"{host.name} has {kept} in quarantine and tells of {told}"


def _claims(observer: Observer, live: dict[str, VmRecord]) -> Iterator[tuple[str, str]]:
    """Each VM holds its name, and nobody else holds one."""
    held: dict[str, str] = {}
    for key, entry in observer.entries("$KV.vm._name.").items():
        uid = held[key] = read(NameClaim, entry.value).uid
        record = live.get(uid)
        if record is None or subjects.name_claim(record.namespace, record.name) != key:
            yield "I5", f"{key} is claimed by {uid}, which is not there"
    for record in live.values():
        key = subjects.name_claim(record.namespace, record.name)
        if held.get(key) != record.uid:
            yield "I13", f"{record.uid} does not hold its name: {held.get(key)} does"
    for uid, wanted in observer.wanted.items():
        last = observer.server.shelf("$KV.vm.x").last(subjects.vm_anywhere(uid))
        gone = last is not None and last.kind is EntryKind.PURGE
        if wanted.delete_accepted and not gone:
            yield "I8", f"{uid}: its delete is accepted and has not ended"


def _reserved(observer: Observer) -> Iterator[tuple[str, str]]:
    """The sum of each node is that of its strict VMs (I5)."""
    records = [seen.record for seen in observer.vms.values() if seen.record is not None]
    for node in observer.hosts:
        there = observer.entries(subjects.node_reserved(node))
        told = [read(Reserved, entry.value) for entry in there.values()]
        strict = [one.spec.domain.cpu.vcpus for one in records if one.reserved and one.node == node]
        held = len(strict), sum(strict)
        said = (told[0].vms, told[0].vcpus) if told else (0, 0)
        if held != said:
            yield "I5", f"{node} has {held} strict VMs and CPUs, and reserves for {said}"


def _unique(observer: Observer) -> Iterator[tuple[str, str]]:
    """No two VMs of a host share an address (I13)."""
    for host in observer.hosts.values():
        addresses = [address for _, address in host.networks.values()]
        if len(addresses) != len(set(addresses)):
            yield "I13", f"{host.name} gave an address twice"
