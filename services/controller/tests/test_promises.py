"""The allocations on each node, after any sequence of records."""

import random

from services.controller.tests.fleets import node, record, uid

from virtbus.controller.core.demand import memory_of
from virtbus.controller.core.fleet import Fleet
from virtbus.schemas import subjects
from virtbus.schemas.vm import Cpu, Domain, VmRecord
from virtbus.schemas.wire import encode


def _sums(fleet: Fleet) -> dict[str, tuple[int, int, int]]:
    """Compute the expected allocations again from all records."""
    found: dict[str, tuple[int, int, int]] = {}
    for held in fleet.vms.values():
        spec = held.record.spec
        vms, vcpus, memory_bytes = found.get(held.record.node, (0, 0, 0))
        found[held.record.node] = (
            vms + 1,
            vcpus + spec.domain.cpu.vcpus * held.record.powered,
            memory_bytes + memory_of(spec) * held.record.powered,
        )
    return found


def _sized(one: VmRecord, cores: int) -> VmRecord:
    domain = Domain(cpu=Cpu(cores=cores))
    return one.model_copy(update={"spec": one.spec.model_copy(update={"domain": domain})})


def test_candidates_equal_a_new_count_of_all_vms() -> None:
    """Creates, resizes, moves, echoes, stale messages and deletes, in any order."""
    rng = random.Random(7)
    fleet, revision = Fleet(), 0
    for name in ("n1", "n2", "n3"):
        fleet.put_node(subjects.node_record(name), encode(node(name)), 0.0, 0)
    for _ in range(2000):
        number = rng.randrange(1, 12)
        held = fleet.vms.get(uid(number))
        revision += rng.choice([0, 1, 1])
        if held is not None and rng.random() < 0.4:
            fleet.purge_vm(subjects.vm_record(held.record.node, uid(number)), revision)
            if rng.random() < 0.5:  # otherwise it is a move whose other half is still to come
                fleet.drop_moved(uid(number), revision)
        else:
            one = record(number, f"v{number}", node=rng.choice(["n1", "n2", "n3"]))
            one = _sized(one, rng.randrange(1, 5))
            one = one.model_copy(update={"powered": rng.random() < 0.7})
            fleet.put_vm(subjects.vm_record(one.node, one.uid), encode(one), revision, 0)
        shown = {
            c.record.node: (c.vms, c.vcpus, c.memory_bytes) for c in fleet.candidates(1.0) if c.vms
        }
        assert shown == _sums(fleet)


def test_the_echo_of_our_own_write_counts_once() -> None:
    fleet, one = Fleet(), record(node="n1")
    body = encode(one)
    key = subjects.vm_record("n1", one.uid)
    assert fleet.put_vm(key, body, 5, 0) == one.uid
    assert fleet.put_vm(key, b"not even read", 5, 0) is None
    assert fleet.promises.on["n1"].vms == 1
