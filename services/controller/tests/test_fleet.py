"""The fleet from its watches: a move is no delete, and no node speaks for others."""

from collections.abc import Callable
from itertools import permutations, product

import pytest
from services.controller.tests.fleets import GIB, node, record, status, uid

from virtbus.controller.core.fleet import GONE_KEPT, Fleet
from virtbus.controller.core.node_views import node_views
from virtbus.controller.core.nodes import DOWN_AFTER_S, LEFT_FOR_S, SUSPECT_AFTER_S
from virtbus.controller.core.unrecorded_vms import HELD
from virtbus.controller.core.view import matching_uids, view
from virtbus.controller.core.vm_keys import StoredVm, read_vm_key
from virtbus.controller.core.vm_states import visible_state
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node import NodeRecord, NodeSpec, NodeState
from virtbus.schemas.quarantine import ORPHANED
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import JoinNonce, NameClaim, Tombstone, VmRecord
from virtbus.schemas.vm_status import Condition, VmStatus
from virtbus.schemas.wire import encode


def put(fleet: Fleet, one: VmRecord, revision: int) -> str | None:
    return fleet.put_vm(subjects.vm_record(one.node, one.uid), encode(one), revision, revision)


def say(fleet: Fleet, one: VmStatus, revision: int) -> str | None:
    return fleet.put_status(subjects.vm_status(one.node, one.uid), encode(one), revision)


def hear(fleet: Fleet, one: NodeRecord, now_s: float, now_ns: int, key: str = "") -> str:
    return fleet.put_node(key or subjects.node_record(one.node), encode(one), now_s, now_ns)


def test_a_record_is_known_by_uid_and_name() -> None:
    fleet, one = Fleet(), record()
    assert put(fleet, one, 5) == one.uid
    assert fleet.vms == {one.uid: StoredVm(one, 5)}
    assert fleet.names == {("default", "web"): one.uid}
    assert fleet.revision == 5


def test_an_older_record_never_replaces_a_newer_one() -> None:
    fleet = Fleet()
    put(fleet, record(labels={"v": "2"}), 6)
    assert put(fleet, record(labels={"v": "1"}), 5) is None
    assert fleet.vms[uid(1)].record.labels == {"v": "2"}


def test_held_vms_of_nodes_are_known_by_uid_until_the_next_report() -> None:
    fleet = Fleet()
    holds = (Condition(type=HELD, status=True),)
    for number, name in enumerate(("n2", "n1"), start=1):
        say(fleet, status(record(node=name), conditions=holds), number)
    assert (fleet.holding.node_of(uid(1)), fleet.holding.node_of(uid(2))) == ("n1", "")
    fleet.purge_status(subjects.vm_status("n1", uid(1)), 3)
    assert fleet.holding.node_of(uid(1)) == "n2"
    say(fleet, status(record(node="n2")), 4)
    assert fleet.holding.node_of(uid(1)) == ""


def test_a_claim_and_a_nonce_are_no_vms() -> None:
    fleet = Fleet()
    claim = subjects.name_claim("default", "web")
    assert fleet.put_vm(claim, encode(NameClaim(uid=uid(1))), 3, 30) is None
    assert fleet.claims[claim].uid == uid(1)
    assert fleet.put_vm(subjects.join_nonce("n1"), encode(JoinNonce(nonce="x")), 4, 40) is None
    tomb = subjects.vm_record("_", uid(1))
    assert fleet.put_vm(tomb, encode(Tombstone(uid=uid(1))), 5, 50) is None
    assert (fleet.vms, fleet.revision) == ({}, 5)


@pytest.mark.parametrize(
    "key",
    [
        subjects.name_claim("default", "web"),
        subjects.join_nonce("n1"),
        "$KV.vm.n1",
        "$KV.vm.n1.x.y.z",
        subjects.vm_record("n1", uid(7)),
    ],
)
def test_the_purge_of_an_unknown_key_is_no_deleted_vm(key: str) -> None:
    """A controller that has just started lists purge markers of claims that it never saw."""
    fleet = Fleet()
    assert fleet.purge_vm(key, 9) is None
    assert set(fleet.gone) <= {uid(7)}
    assert fleet.revision == 9


def test_a_purge_ends_a_vm_and_frees_its_name() -> None:
    fleet, one = Fleet(), record(deleting=True)
    put(fleet, one, 5)
    assert fleet.purge_vm(subjects.vm_record("n1", one.uid), 6) == one.uid
    assert (fleet.vms, fleet.names, fleet.gone) == ({}, {}, {one.uid: 6})


def test_a_purge_keeps_a_name_that_another_vm_took() -> None:
    fleet = Fleet()
    put(fleet, record(1, deleting=True), 5)
    put(fleet, record(2), 6)
    fleet.purge_vm(subjects.vm_record("n1", uid(1)), 7)
    assert fleet.names == {("default", "web"): uid(2)}


def test_a_move_is_no_delete() -> None:
    """The batch purges on the old node first, then puts on the new one."""
    fleet = Fleet()
    put(fleet, record(), 5)
    moved = record(node="n2", epoch=2)
    assert fleet.purge_vm(subjects.vm_record("n1", uid(1)), 6) is None
    assert uid(1) in fleet.vms, "nobody is told that it went"
    assert put(fleet, moved, 7) == uid(1)
    assert fleet.drop_moved(uid(1), 6) is None
    assert (fleet.vms[uid(1)].record, fleet.gone) == (moved, {})
    # The old node's marker comes once more with a list: it is older, and of another node.
    assert fleet.purge_vm(subjects.vm_record("n1", uid(1)), 6) is None
    assert fleet.purge_vm(subjects.vm_record("n1", uid(1)), 8) is None
    assert uid(1) in fleet.vms


def test_an_empty_purge_marker_without_a_move_ends_the_vm_after_a_while() -> None:
    fleet = Fleet()
    put(fleet, record(), 5)
    fleet.purge_vm(subjects.vm_record("n1", uid(1)), 6)
    assert fleet.drop_moved(uid(1), 5) is None
    assert fleet.drop_moved(uid(1), 6) == uid(1)
    assert (fleet.vms, fleet.gone) == ({}, {uid(1): 6})


def test_our_own_write_is_not_undone_by_an_older_marker() -> None:
    fleet = Fleet()
    put(fleet, record(), 9)
    assert fleet.purge_vm(subjects.vm_record("n1", uid(1)), 8) is None
    assert uid(1) in fleet.vms


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_buckets_may_come_in_any_order(order: tuple[int, ...]) -> None:
    fleet, one = Fleet(), record()
    steps: list[Callable[[], object]] = [
        lambda: put(fleet, one, 5),
        lambda: say(fleet, status(one), 3),
        lambda: hear(fleet, node(), 0.0, 0),
    ]
    for index in order:
        steps[index]()
    shown = fleet.show(one.uid, 1.0)
    assert shown is not None
    assert shown.state is VmState.RUNNING


# --- statuses --------------------------------------------------------------------------------
def test_a_status_of_an_older_epoch_shows_nothing_of_the_vm() -> None:
    fleet = Fleet()
    put(fleet, record(epoch=2), 5)
    say(fleet, status(record(epoch=1), VmState.RUNNING, message="old"), 3)
    shown = fleet.show(uid(1), 0.0)
    assert shown is not None
    assert (shown.state, shown.message, shown.observed_generation) == (VmState.SCHEDULED, "", 0)


def test_another_node_cannot_speak_for_a_vm() -> None:
    """A node may write below its own prefix: its data about others' VMs does not count."""
    fleet, one = Fleet(), record()
    put(fleet, one, 5)
    say(fleet, status(one), 3)
    forged = status(one, VmState.FAILED, node="n2", epoch=99, released=True)
    say(fleet, forged, 4)
    shown = fleet.show(one.uid, 0.0)
    assert shown is not None
    assert shown.state is VmState.RUNNING
    held = fleet.status_of(one)
    assert held is not None
    assert not held[0].released
    fleet.purge_status(subjects.vm_status("n2", one.uid), 6)
    assert fleet.status_of(one) == held


@pytest.mark.parametrize("body_node", ["n1", "n2"])
def test_a_status_that_is_not_of_its_key_is_refused(body_node: str) -> None:
    fleet, one = Fleet(), record()
    put(fleet, one, 5)
    lying = status(one, node=body_node)
    for key in (subjects.vm_status("n3", one.uid), subjects.vm_status(body_node, uid(8))):
        with pytest.raises(VirtbusError):
            fleet.put_status(key, encode(lying), 4)
    assert fleet.status_of(one) is None


def test_a_node_record_that_is_not_of_its_key_is_refused() -> None:
    fleet = Fleet()
    with pytest.raises(VirtbusError):
        hear(fleet, node("n2"), 0.0, 0, key=subjects.node_record("n1"))
    assert fleet.nodes == {}


@pytest.mark.parametrize("key", ["$KV.st.n1", "$KV.st.n1.x.y", "$KV.st.n1.nobody"])
def test_an_unexpected_status_key_is_ignored(key: str) -> None:
    fleet = Fleet()
    fleet.purge_status(key, 3)
    with pytest.raises(VirtbusError):
        fleet.put_status(key, b"\x80", 4)


@pytest.mark.parametrize(
    "value", [b"", b"\x01", b"\x90", b"\xc0", b"{", b"\xc1", b"\x80", b"x" * 9]
)
def test_an_unreadable_record_is_one_kind_of_error(value: bytes) -> None:
    for key in (subjects.vm_record("n1", uid(1)), subjects.name_claim("default", "web")):
        with pytest.raises(VirtbusError):
            read_vm_key(key, value)


def test_a_move_shows_the_new_nodes_status() -> None:
    fleet, one = Fleet(), record()
    put(fleet, one, 5)
    say(fleet, status(one), 3)
    moved = record(node="n2", epoch=2)
    put(fleet, moved, 6)
    say(fleet, status(moved, VmState.STARTING), 4)
    shown = fleet.show(one.uid, 0.0)
    assert shown is not None
    assert shown.state is VmState.STARTING


# --- nodes -----------------------------------------------------------------------------------
def test_a_node_is_silent_after_a_while_and_heard_again_at_once() -> None:
    fleet, one = Fleet(), record()
    put(fleet, one, 1)
    say(fleet, status(one), 1)
    hear(fleet, node(), 100.0, 0)
    assert not fleet.silent("n1", 100.0 + SUSPECT_AFTER_S)
    assert fleet.silent("n1", 100.1 + SUSPECT_AFTER_S)
    assert fleet.node_state("n1", 100.0 + DOWN_AFTER_S) is NodeState.SUSPECT
    assert fleet.node_state("n1", 100.1 + DOWN_AFTER_S) is NodeState.DOWN
    shown = fleet.show(one.uid, 200.0)
    assert shown is not None
    assert shown.state is VmState.UNKNOWN
    assert [c.type for c in shown.conditions] == ["NodeSilent"]
    assert shown.reason == "node_down"
    assert "n1" in shown.message
    hear(fleet, node(), 200.0, 0)
    assert not fleet.silent("n1", 200.0)


def test_a_vm_is_unknown_until_its_restarted_agent_has_compared_it() -> None:
    fleet, one = Fleet(), record()
    put(fleet, one, 1)
    say(fleet, status(one), 1)
    shown = fleet.show(one.uid, 0.0)
    assert shown is not None
    assert shown.state is VmState.RUNNING, "a node that this controller has not heard yet"
    hear(fleet, node().model_copy(update={"state": NodeState.RECOVERING}), 1.0, 0)
    shown = fleet.show(one.uid, 1.0)
    assert shown is not None
    assert shown.state is VmState.UNKNOWN
    assert shown.reason == "node_recovering"
    assert not fleet.silent("n1", 1.0)
    hear(fleet, node(), 2.0, 0)
    shown = fleet.show(one.uid, 2.0)
    assert shown is not None
    assert shown.state is VmState.RUNNING


@pytest.mark.parametrize("off_s", [-3600, 3600, 366 * 86_400])
def test_a_wrong_clock_of_a_node_is_reported_and_never_counts_as_silence(off_s: int) -> None:
    fleet, now_ns = Fleet(), 2 * 10**18
    hear(fleet, node(time_ns=now_ns + off_s * 10**9), 100.0, now_ns)
    assert not fleet.silent("n1", 100.0)
    assert fleet.node_state("n1", 100.1 + DOWN_AFTER_S) is NodeState.DOWN
    assert [one.skew_s for one in node_views(fleet, 100.0)] == [off_s]


def test_no_node_is_silent_while_the_bus_just_came_back() -> None:
    fleet = Fleet()
    hear(fleet, node(), 0.0, 0)
    fleet.quiet_since_s = 1000.0
    assert not fleet.silent("n1", 1000.0 + SUSPECT_AFTER_S)
    assert fleet.silent("n1", 1000.1 + SUSPECT_AFTER_S)


def join(fleet: Fleet, node: str, revision: int = 1) -> None:
    fleet.put_vm(subjects.join_nonce(node), encode(JoinNonce(nonce="x")), revision, 1)


def test_a_joined_node_is_known_before_its_heartbeat_and_takes_no_vms() -> None:
    fleet = Fleet(quiet_since_s=100.0)
    join(fleet, "n3")
    assert fleet.known_nodes() == ["n3"]
    assert fleet.has_node("n3")
    assert not fleet.has_node("n4")
    assert [one.state for one in node_views(fleet, 101.0)] == [NodeState.RECOVERING]
    assert [one.state for one in node_views(fleet, 101.0 + DOWN_AFTER_S)] == [NodeState.DOWN]
    assert not fleet.may_be_off("n3", 101.0)
    assert fleet.may_be_off("n3", 101.0 + DOWN_AFTER_S)
    assert fleet.candidates(101.0) == []
    fleet.purge_vm(subjects.join_nonce("n3"), 2)
    assert fleet.known_nodes() == []


def test_joined_nodes_that_were_never_heard_and_have_no_vms_trigger_no_brake() -> None:
    fleet = Fleet(quiet_since_s=100.0)
    for number in range(2, 9):
        join(fleet, f"n{number}")
    hear(fleet, node(), 200.0, 0)
    assert not fleet.must_brake(200.0)
    for number in range(2, 9):
        put(fleet, record(number, node=f"n{number}"), number)
    assert fleet.must_brake(200.0)


def test_a_node_that_left_is_shown_until_it_is_forgotten() -> None:
    fleet = Fleet()
    for name in ("n1", "n2"):
        hear(fleet, node(name, state=NodeState.LEFT), 100.0, 0)
    join(fleet, "n1")
    fleet.forget_left(100.1 + LEFT_FOR_S)
    assert [(one.node, one.state) for one in node_views(fleet, 999.0)] == [("n1", NodeState.LEFT)]
    fleet.purge_vm(subjects.join_nonce("n1"), 2)
    assert fleet.known_nodes() == []


def test_allocations_on_a_node_are_counted() -> None:
    fleet = Fleet()
    hear(fleet, node(time_ns=2_500_000_000), 10.0, 1_000_000_000)
    put(fleet, record(1, "a"), 1)
    put(fleet, record(2, "b", deleting=True), 2)
    put(fleet, record(3, "c", node="n2"), 3)
    shown, other = node_views(fleet, 12.0)
    assert (other.node, other.vms) == ("n2", 1), "never heard, but it holds a VM"
    assert (shown.vms, shown.committed_vcpus, shown.age_s, shown.skew_s) == (2, 2, 2.0, 1.5)
    assert GIB // 2 < shown.committed_memory_bytes < GIB


# --- answers ---------------------------------------------------------------------------------
def test_placement_sees_every_change_of_a_node_at_once() -> None:
    """The incremental cache of the nodes equals a new one."""
    fleet, now_s = Fleet(), 100.0
    here, there = record(), record(node="n2", reserved=True)
    changes: list[Callable[[], object]] = [
        lambda: [hear(fleet, node(name), now_s, 0) for name in ("n1", "n2", "n3")],
        lambda: fleet.apply(StoredVm(here, 5)),
        lambda: fleet.node_spec(NodeSpec(node="n3", cordoned=True), 6),
        lambda: fleet.apply(StoredVm(there, 7)),  # it moved
        lambda: hear(fleet, node("n1", memory_bytes=GIB), now_s, 0),
        lambda: fleet.node_spec(NodeSpec(node="n3"), 8),
        lambda: fleet.drop_vm(here.uid, 9),
        lambda: hear(fleet, node("n2", state=NodeState.LEFT), now_s, 0),
    ]
    seen = []
    for change in changes:
        change()
        kept = fleet.candidates(now_s)
        assert kept == [fleet.candidate(name, now_s) for name in fleet.nodes]
        assert kept not in seen
        seen.append(kept)
    assert all(one.silent for one in fleet.candidates(now_s + SUSPECT_AFTER_S + 1))


def test_vms_are_listed_by_namespace_name_and_uid() -> None:
    fleet = Fleet()
    put(fleet, record(1, "b", namespace="shop"), 1)
    put(fleet, record(2, "b"), 2)
    put(fleet, record(3, "a", labels={"x": "1", "y": "2"}), 3)
    assert matching_uids(fleet.vms, None, {}) == [uid(3), uid(2), uid(1)]
    assert matching_uids(fleet.vms, "shop", {}) == [uid(1)]
    assert matching_uids(fleet.vms, None, {"x": "1"}) == [uid(3)]
    assert matching_uids(fleet.vms, None, {"x": "2"}) == []


def test_the_memory_of_deleted_vms_is_bounded() -> None:
    fleet = Fleet()
    for number in range(1, GONE_KEPT + 11):
        fleet.drop_vm(uid(number), number)
    assert len(fleet.gone) == GONE_KEPT
    assert fleet.forgotten_revision == 10


# --- view ------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", VmState)
def test_the_view_shows_the_nodes_status(state: VmState) -> None:
    one = record()
    assert visible_state(one, status(one, state), NodeState.READY) is state


def test_an_orphan_that_waits_for_a_node_is_shown_as_both() -> None:
    one = record(node="_", annotations={ORPHANED: "web is gone"})
    shown = view(one, 1, None, NodeState.DOWN, unplaced="no node has room")
    assert [(one.type, one.message) for one in shown.conditions] == [
        ("Placed", "no node has room"),
        ("Orphaned", "web is gone"),
    ]


def test_a_delete_wins_in_the_view() -> None:
    one = record(deleting=True)
    for state, node_state in product(VmState, NodeState):
        assert visible_state(one, status(one, state), node_state) is VmState.DELETING


def test_a_view_joins_record_and_status() -> None:
    one = record(labels={"a": "1"}, generation=3)
    seen = status(one, message="m", restarts=2, accelerator="kvm", started_ns=9, generation=2)
    shown = view(one, 42, seen, NodeState.READY)
    assert (shown.revision, shown.generation, shown.observed_generation) == (42, 3, 2)
    assert (shown.message, shown.restarts, shown.accelerator, shown.started_ns) == (
        "m",
        2,
        "kvm",
        9,
    )


def test_a_vm_without_a_status_is_scheduled() -> None:
    assert view(record(), 1, None, NodeState.READY).state is VmState.SCHEDULED
