"""Placement: each filter refuses for its own reason, and the order of fitting nodes is stable."""

import random
from dataclasses import replace
from typing import Any

import pytest
from services.controller.tests.fleets import GIB, node, spec

from virtbus.controller.core.demand import (
    HOSTNAME,
    OVERLAY_BYTES,
    QEMU_OVERHEAD_BYTES,
    demand_of,
    disk_of,
)
from virtbus.controller.core.placement import (
    FILTERS,
    MEMORY_RESERVE_BYTES,
    Candidate,
    impossible,
    kind_of,
    place,
    why_unplaced,
)
from virtbus.schemas.errors import Code
from virtbus.schemas.image import image_key
from virtbus.schemas.node import NodeState, ServiceState
from virtbus.schemas.overlay import TunnelEnd
from virtbus.schemas.vm import VmSpec
from virtbus.schemas.wire import encode

MIB = 1024**2


def candidate(
    name: str = "n1",
    *,
    vms: int = 0,
    vcpus: int = 0,
    promised: int = 0,
    silent: bool = False,
    cordoned: str = "",
    images: tuple[str, ...] = (),
    **more: Any,
) -> Candidate:
    known = node(name, **more)
    keys = frozenset(map(image_key, images))
    return Candidate(known, vms, vcpus, promised, silent=silent, cordoned=cordoned, images=keys)


REFUSALS: list[tuple[Candidate, VmSpec, str]] = [
    (candidate(cordoned="is cordoned"), spec(), "is cordoned"),
    (candidate(silent=True), spec(), "does not answer"),
    (candidate(state=NodeState.RECOVERING), spec(), "is recovering"),
    (candidate(state=NodeState.DRAINING), spec(), "is draining"),
    (
        candidate(labels={"zone": "b"}),
        spec(node_selector={"zone": "a", "disk": "ssd"}),
        "lacks the label disk=ssd, zone=a",
    ),
    (candidate(), spec(node_selector={HOSTNAME: "n2"}), "is not n2"),
    (
        candidate(),
        spec(domain={"accelerator": "kvm"}),
        "cannot run kvm guests (it has tcg)",
    ),
    (
        candidate(),
        spec(networks=[{"name": "x", "network": "blue"}]),
        "has no network named blue",
    ),
    (
        candidate(directories={"/srv/a": ("default",)}),
        spec(domain={"devices": {"filesystems": [{"name": "www", "directory": "/srv/ab"}]}}),
        "does not offer the directory /srv/ab (directories_allowed)",
    ),
    (
        candidate(max_vcpus=4),
        spec(domain={"cpu": {"cores": 5}}),
        "runs at most 4 vCPUs in a VM, 5 asked",
    ),
    (candidate(vcpus=62), spec(domain={"cpu": {"cores": 3}}), "has 2 vCPUs left, 3 asked"),
    (candidate(vcpus=99), spec(), "has 0 vCPUs left, 1 asked"),
    (
        candidate(promised=15 * GIB),
        spec(domain={"memory": {"guest": GIB}}),
        "has 512MiB of memory left, 1.0GiB asked",
    ),
    (candidate(promised=99 * GIB), spec(), "has 0B of memory left, 304MiB asked"),
    (
        candidate(disk_free_bytes=2 * GIB + 2**20, disk_reserve_bytes=2 * GIB),
        spec(volumes=[{"name": "root", "image": {"ref": "tiny"}}]),
        "has 2.0GiB of disk free and keeps 2GiB (min_free_bytes, min_free_ratio); free some there",
    ),
]


@pytest.mark.parametrize(("there", "wanted", "why"), REFUSALS, ids=lambda one: str(one)[-40:])
def test_a_filter_refuses_with_its_reason(there: Candidate, wanted: VmSpec, why: str) -> None:
    placed = place(wanted, [there])
    assert (placed.nodes, dict(placed.refused)) == ((), {"n1": why})


def test_every_filter_has_a_case() -> None:
    met = {
        next(check for check in FILTERS if check(demand_of(wanted), there))
        for there, wanted, _ in REFUSALS
    }
    assert met == set(FILTERS)


def test_memory_fits_to_the_last_byte() -> None:
    free = 16 * GIB - MEMORY_RESERVE_BYTES - QEMU_OVERHEAD_BYTES
    assert place(spec(domain={"memory": {"guest": free}}), [candidate()]).nodes == ("n1",)
    assert place(spec(domain={"memory": {"guest": free + 1}}), [candidate()]).nodes == ()


def test_the_share_of_cpus_is_the_settings_but_a_strict_node_has_none() -> None:
    there = replace(candidate(vcpus=64), vcpus_per_cpu=8.25)
    assert place(spec(domain={"cpu": {"cores": 2}}), [there]).nodes == ("n1",)
    assert place(spec(domain={"cpu": {"cores": 3}}), [there]).nodes == ()
    assert place(spec(), [replace(there, vcpus=8, strict=True)]).nodes == ()


def test_disks_count_a_first_boots_writes_and_newer_allocations() -> None:
    small, large = (
        spec(volumes=[{"name": "d", "empty_disk": {"capacity": size}}]) for size in (MIB, 64 * GIB)
    )
    assert (disk_of(small), disk_of(large)) == (MIB, OVERLAY_BYTES)
    there = candidate(disk_free_bytes=GIB + MIB, disk_reserve_bytes=GIB)
    assert place(small, [there]).nodes
    assert not place(small, [replace(there, fresh_vms=1)]).nodes
    simulated = candidate(disk_free_bytes=0, disk_reserve_bytes=0)
    assert place(large, [simulated]).nodes


def test_a_value_within_its_bound_is_unchanged() -> None:
    wanted = spec(node_selector={"zone": "a"}, domain={"accelerator": "kvm"})
    there = candidate(labels={"zone": "a", "more": "x"}, accelerators=("kvm", "tcg"))
    assert place(wanted, [there]).nodes == ("n1",)


def test_a_node_selected_by_name_is_the_only_candidate() -> None:
    nodes = [candidate("n1", vms=9), candidate("n2"), candidate("n3", labels={HOSTNAME: "box"})]
    for wanted, name in (("n1", "n1"), ("box", "n3")):
        found = place(spec(node_selector={HOSTNAME: wanted}), nodes)
        assert found.nodes == (name,)
        assert set(found.refused.values()) == {f"is not {wanted}"}
    never = impossible(demand_of(spec(node_selector={HOSTNAME: "none"})), nodes)
    assert never is not None
    assert "is not none" in never.body.details[0].message


def test_the_emptier_node_is_first() -> None:
    nodes = [candidate("n1", promised=4 * GIB), candidate("n2", promised=2 * GIB)]
    assert place(spec(), nodes).nodes == ("n2", "n1")


@pytest.mark.parametrize(
    ("ref", "held"), [("tiny", "tiny"), (f"x@sha256:{'0' * 64}", f"sha256:{'0' * 64}")]
)
def test_a_node_that_has_the_image_is_first(ref: str, held: str) -> None:
    wanted = spec(volumes=[{"name": "root", "image": {"ref": ref}}])
    nodes = [candidate("n1"), candidate("n2", images=(held,))]
    assert place(wanted, nodes).nodes == ("n2", "n1")


def test_a_node_that_has_the_container_image_is_first() -> None:
    wanted = spec(volumes=[{"name": "root", "container_disk": {"image": "fedora"}}])
    held = candidate("n2", images=("docker://docker.io/library/fedora:latest",))
    assert place(wanted, [candidate("n1"), held]).nodes == ("n2", "n1")


def test_a_node_without_its_services_is_last_however_empty() -> None:
    ready, away = ServiceState(state=NodeState.READY), ServiceState()
    nodes = [
        candidate("n1", services={"netd": away, "imaged": ready}),
        candidate("n2", services={"netd": ready, "imaged": ready}, promised=14 * GIB),
    ]
    assert place(spec(), nodes).nodes == ("n2", "n1")


def test_equal_nodes_are_ordered_by_fewest_vms_and_then_by_name() -> None:
    nodes = [
        candidate("n3"),
        candidate("n1", vms=2),
        candidate("n2", vms=1),
        candidate("n0", vms=1),
    ]
    assert place(spec(), nodes).nodes == ("n3", "n0", "n2", "n1")


def test_the_order_of_the_nodes_does_not_matter() -> None:
    nodes = [candidate(f"n{i}", vms=i % 3, promised=(i % 4) * GIB) for i in range(12)]
    first = place(spec(), nodes).nodes
    shuffled = random.Random(7)
    for _ in range(20):
        shuffled.shuffle(nodes)
        assert place(spec(), nodes).nodes == first


def test_without_nodes_the_reason_names_the_command_to_start_one() -> None:
    assert "virtbus up" in why_unplaced({})
    assert impossible(demand_of(spec()), []) is None, "one may join"


def test_the_reason_of_a_pending_vm_names_each_node_and_stays_short() -> None:
    why = why_unplaced({"n2": "is draining", "n1": "does not answer"})
    assert why == "no node can take it now: n1 does not answer; n2 is draining"
    many = why_unplaced({f"n{number:03}": "is draining" for number in range(200)})
    assert many.endswith("; and 192 more")


BIG = spec(domain={"memory": {"guest": 64 * GIB}})
NEVER: list[tuple[Candidate, VmSpec, bool]] = [
    (candidate(), BIG, True),
    (candidate(), spec(domain={"cpu": {"cores": 65}}), True),
    (candidate(max_vcpus=4), spec(domain={"cpu": {"cores": 5}}), True),
    (candidate(labels={"zone": "b"}), spec(node_selector={"zone": "a"}), True),
    (candidate(), spec(domain={"accelerator": "kvm"}), True),
    (candidate(), spec(networks=[{"name": "x", "network": "blue"}]), True),
    (
        candidate(services={"netd": ServiceState(message="does not answer")}),
        spec(networks=[{"name": "x", "network": "blue"}]),
        False,
    ),
    (candidate(silent=True), spec(), False),
    (candidate(state=NodeState.RECOVERING), spec(), False),
    (candidate(state=NodeState.DRAINING), spec(), False),
    (candidate(vcpus=64), spec(), False),
    (candidate(promised=16 * GIB), spec(), False),
    (candidate(disk_free_bytes=1, disk_reserve_bytes=GIB), spec(), False),
]


@pytest.mark.parametrize(("there", "wanted", "ever"), NEVER, ids=lambda one: str(one)[-40:])
def test_a_vm_that_may_fit_later_waits_and_one_that_never_fits_is_refused(
    there: Candidate, wanted: VmSpec, ever: bool
) -> None:
    refusal = impossible(demand_of(wanted), [there])
    assert (refusal is not None) is ever
    assert place(wanted, [there]).nodes == ()
    if refusal is not None:
        assert (refusal.code, refusal.reason) == (Code.UNSUPPORTED, "no_capacity")
        assert refusal.body.retry == "never"
        assert [detail.path for detail in refusal.body.details] == ["node/n1"]


def test_one_node_that_could_hold_it_when_empty_is_enough_to_wait_for() -> None:
    large = candidate("n2", memory_bytes=128 * GIB, promised=127 * GIB)
    assert impossible(demand_of(BIG), [candidate(), large]) is None


def test_a_stopped_vm_needs_no_memory_now_but_a_node_that_could_run_it() -> None:
    full = candidate(promised=16 * GIB, vcpus=64)
    assert place(spec(), [full], powered=False).nodes == ("n1",)
    assert place(BIG, [full], powered=False).nodes == ()


def test_nodes_of_one_kind_are_placed_as_if_each_were_judged() -> None:
    """The kind is only a short cut: data about a node never changes the result."""
    rng = random.Random(3)
    for _ in range(200):
        nodes = [
            candidate(
                f"n{i}",
                vms=rng.randrange(3),
                promised=rng.randrange(18) * GIB,
                silent=rng.random() < 0.1,
                labels=rng.choice([{}, {"zone": "a"}]),
                networks=rng.choice([("default",), ("blue", "default")]),
                images=rng.choice([(), ("tiny",)]),
                state=rng.choice([NodeState.READY, NodeState.READY, NodeState.RECOVERING]),
                cpus=rng.choice([1, 8]),
            )
            for i in range(12)
        ]
        kinds = [
            replace(n, kind=kind_of(n.record.model_dump()) + encode(sorted(n.images)))
            for n in nodes
        ]
        assert 1 < len({n.kind for n in kinds}) < 12
        wanted = spec(
            volumes=[{"name": "root", "image": {"ref": "tiny"}}],
            node_selector=rng.choice([{}, {"zone": "a"}]),
            networks=[{"name": "x", "network": rng.choice(["default", "blue"])}],
        )
        found, each = place(wanted, kinds), place(wanted, nodes)
        assert (found.nodes, found.refused) == (each.nodes, each.refused)
        assert found.best == found.nodes[:1]
        want = demand_of(wanted)
        told = {n.record.node: [check(want, n) for check in FILTERS] for n in nodes}
        assert sorted(found.nodes) == sorted(name for name, why in told.items() if not any(why))
        assert dict(found.refused) == {
            name: next(filter(None, why)) for name, why in told.items() if any(why)
        }


def test_differences_within_a_kind_make_no_new_kind() -> None:
    one, other = (
        node(
            f"n{number}",
            cpus=4 * number,
            services={"netd": ServiceState(state=NodeState.READY, seen_ns=number)},
            addresses=(f"192.0.2.{number}",),
            tunnel=TunnelEnd(address=f"192.0.2.{number}", mtu=1400 + number),
            held=number,
            image_bytes=number,
        )
        for number in (1, 2)
    )
    assert kind_of(one.model_dump()) == kind_of(other.model_dump())
    assert kind_of(one.model_dump()) != kind_of(node(labels={"a": "b"}).model_dump())
    without = one.model_copy(update={"tunnel": None})
    assert kind_of(one.model_dump()) != kind_of(without.model_dump())
