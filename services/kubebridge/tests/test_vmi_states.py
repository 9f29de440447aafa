"""The status of a VMI, and the actions that follow."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from services.kubebridge.tests.manifests import UID, find, put, vm, vmi
from services.kubebridge.tests.world import (
    CLUSTER,
    GONE,
    NOW,
    kept_whole,
    pair,
    reconcile_vmi,
    view,
    vmi_said,
)

from virtbus.kubebridge.core.objects.unstructured import read, stamp
from virtbus.kubebridge.core.runtime.controller import (
    AT_ONCE_S,
    SECRET,
    Await,
    BusCall,
    Key,
    Patch,
    RecordEvent,
    Refused,
    Requeue,
)
from virtbus.kubebridge.core.vm import status as vm_status
from virtbus.kubebridge.core.vm.model import StateChange
from virtbus.kubebridge.core.vmi import orphans
from virtbus.kubebridge.core.vmi import reconcile as vmi_rules
from virtbus.kubebridge.core.vmi.model import VmiPhase
from virtbus.kubebridge.core.vmi.status import Seen
from virtbus.schemas.guest import GuestInfo, GuestInterface, GuestOs
from virtbus.schemas.guest_end import GuestExit
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.quarantine import ORPHANED
from virtbus.schemas.states import VmState
from virtbus.schemas.vm_status import GUEST_ENDED, Condition

ERRORS = Path(__file__).parents[3] / "docs/reference/errors.md"


def status_of(seen: Seen, **status: Any) -> dict[str, Any]:
    whole = put(vmi(), {"status": status})
    return vmi_said(whole, seen, NOW)


def test_the_status_of_a_running_vmi_is_complete() -> None:
    nic = InterfaceStatus(name="default", mac="02:00:00:00:00:05", addresses=("10.0.0.5/24",))
    guest = GuestInfo(
        os=GuestOs(id="debian", pretty_name="Debian 12"),
        interfaces=(
            GuestInterface(name="ens2", mac=nic.mac, addresses=("10.0.0.5/24", "fe80::1/64")),
        ),
    )
    seen = view(UID, state=VmState.RUNNING, interfaces=(nic,))
    said = status_of(Seen(seen, guest=guest), phase="Scheduled")
    assert said["phase"] == "Running"
    assert find(said["conditions"], "Ready")["status"] == "True"
    assert find(said["conditions"], "AgentConnected")["status"] == "True"
    assert find(said["conditions"], "LiveMigratable")["status"] == "False"
    assert said["interfaces"] == [
        {
            "name": "default",
            "mac": nic.mac,
            "ipAddress": "10.0.0.5",
            "linkState": "up",
            "ipAddresses": ["10.0.0.5", "fe80::1"],
            "interfaceName": "ens2",
            "queueCount": 1,
            "infoSource": "domain, guest-agent",
        }
    ]
    assert said["guestOSInfo"] == {"id": "debian", "prettyName": "Debian 12"}
    assert said["nodeName"] == "n1"
    again = put(vmi(), {"status": said})
    assert vmi_said(again, Seen(seen, guest=guest), NOW + timedelta(hours=1)) == said


def test_a_frozen_guest_is_shown_until_it_is_thawed() -> None:
    frozen = Condition(type="Frozen", status=True, reason="Requested")
    seen = view(UID, state=VmState.RUNNING, conditions=(frozen,))
    said = status_of(Seen(seen))
    assert said["fsFreezeStatus"] == "frozen"
    thawed = put(vmi(), {"status": said})
    assert "fsFreezeStatus" not in vmi_said(thawed, Seen(view(UID, state=VmState.RUNNING)), NOW)


def test_the_status_is_kept_while_the_vm_is_not_seen() -> None:
    running = put(vmi(), {"status": status_of(Seen(view(UID, state=VmState.RUNNING)))})
    create, *again = reconcile_vmi(running, Seen(), {}, NOW, CLUSTER)
    assert isinstance(create, BusCall)  # the next reconcile gets its answer
    assert Requeue(AT_ONCE_S) in again
    assert all(isinstance(one, Requeue) for one in again)
    changed = Refused(code=409, reason="uid_taken", message="not as asked for here")
    create, *again = reconcile_vmi(running, Seen(refused=changed), {}, NOW, CLUSTER)
    assert isinstance(create, BusCall)
    assert again == [Requeue(vmi_rules.RETRY_S[0])]
    gone = reconcile_vmi(running, Seen(gone=True), {}, NOW, CLUSTER)
    assert [one.changes["status"]["phase"] for one in gone if isinstance(one, Patch)] == ["Failed"]


def test_a_guest_agents_answer_is_kept_until_the_next_poll() -> None:
    nic = InterfaceStatus(name="default", mac="02:00:00:00:00:05", addresses=("10.0.0.5/24",))
    running = view(UID, state=VmState.RUNNING, interfaces=(nic,))
    told_ = vmi_said(put(vmi(), {"status": {}}), Seen(running, guest=GUEST), NOW)
    before = put(vmi(), {"status": told_})
    assert vmi_said(before, Seen(running, asked=False), NOW) == told_
    silent = vmi_said(before, Seen(running), NOW)
    assert find(silent["conditions"], "AgentConnected") == {}
    assert (silent["guestOSInfo"], "interfaceName" in silent["interfaces"][0]) == ({}, False)
    never = vmi_said(vmi(), Seen(running, asked=False), NOW)
    assert find(never["conditions"], "AgentConnected") == {}


def test_a_paused_vmi_has_a_reason_and_is_not_ready() -> None:
    paused = Condition(type="Paused", status=True, reason="PausedIOError", message="disk full")
    said = status_of(Seen(view(UID, state=VmState.PAUSED, conditions=(paused,))))
    assert find(said["conditions"], "Paused")["reason"] == "PausedIOError"
    assert find(said["conditions"], "Ready")["status"] == "False"
    assert said["phase"] == "Running"


@pytest.mark.parametrize(
    ("seen", "kind", "reason"),
    [
        (Seen(view(UID, node="_", reason="unplaced", message="no room")), "PodScheduled",
         "Unschedulable"),
        (Seen(view(UID, state=VmState.FAILED, failure_stage="image",
              message="no such", reason="image_not_found")),
         "Synchronized", "ErrImagePull"),
        (Seen(view(UID, state=VmState.FAILED, reason="no_room", failure_stage="start",
              message="no memory")),
         "Synchronized", "FailedStart"),
        (Seen(waits="Secret a does not exist"), "Synchronized", "FailedCreate"),
        (Seen(refused=Refused(code=429, reason="full", message="full")), "Synchronized",
         "FailedCreate"),
    ],
)  # fmt: skip
def test_a_condition_shows_an_obstacle(seen: Seen, kind: str, reason: str) -> None:
    found = find(status_of(seen)["conditions"], kind)
    assert (found["status"], found["reason"]) == ("False", reason)
    assert found["message"]


GUEST = GuestInfo(
    hostname="a",
    os=GuestOs(id="debian", name="Debian", pretty_name="D", version="12", version_id="12",
               kernel_release="6", kernel_version="6", machine="x86_64"),
    interfaces=(GuestInterface(name="ens2", mac="02:00:00:00:00:05", addresses=("fe80::1/64",)),),
)  # fmt: skip
VIEWS = [
    view(
        UID, state=state, node=node, reason=reason, message=message, failure_stage=stage,
        conditions=(Condition(type="Paused", status=True, reason="PausedIOError", message="full"),),
        interfaces=(InterfaceStatus(name="d", mac="02:00:00:00:00:05", addresses=("10.0.0.5/24",)),
                    InterfaceStatus(name="e", mac="02:00:00:00:00:06")),
    )
    for state in VmState
    for node, stage, reason, message in (
        ("n1", "", "", ""), ("n1", "guest", GUEST_ENDED, "crashed"),
        ("n1", "image", "image_denied", "private"), ("_", "", "unplaced", "no room"))
]  # fmt: skip
SEEN = [
    *(Seen(one, guest=GUEST) for one in VIEWS),
    Seen(view(UID, state=VmState.RUNNING), guest=GuestInfo()),
    Seen(),
    Seen(gone=True),
    Seen(waits="Secret a does not exist"),
    Seen(refused=Refused(code=429, reason="full", message="full")),
]


@pytest.mark.parametrize("before", ["", *VmiPhase])
@pytest.mark.parametrize("deleted", [False, True])
def test_the_crd_accepts_every_status(before: str, *, deleted: bool) -> None:
    whole = put(vmi(), {"status": {"phase": before} if before else {}})
    if deleted:
        put(whole, {"metadata.deletionTimestamp": GONE})
    requests = [read(StateChange, {"action": "Start", "data": {"paused": "true"}})]
    for seen in SEEN:
        for retried in ("", GONE):
            kept_whole(vmi_said(whole, seen, NOW, retried))
        both = pair(vm(), put(whole, {"status": vmi_said(whole, seen, NOW)}))
        kept_whole(
            vm_status.status(
                both,
                requests,
                NOW,
                failed="quota",
                observed="Always",
            )
        )


@pytest.mark.parametrize(
    ("state", "node", "deleted", "reason"),
    [
        (VmState.PENDING, "_", False, "PodNotExists"),
        (VmState.STARTING, "n1", False, "GuestNotRunning"),
        (VmState.PAUSED, "n1", False, "GuestNotRunning"),
        (VmState.RUNNING, "n1", True, "PodTerminating"),
        (VmState.STOPPING, "n1", True, "GuestNotRunning"),
    ],
)
def test_the_ready_condition_has_kubevirts_reasons(
    state: VmState, node: str, reason: str, *, deleted: bool
) -> None:
    whole = put(vmi(), {"metadata.deletionTimestamp": GONE}) if deleted else vmi()
    said = vmi_said(whole, Seen(view(UID, state=state, node=node)), NOW)
    ready = find(said["conditions"], "Ready")
    assert (ready["status"], ready["reason"]) == ("False", reason)
    assert ready["message"]


@pytest.mark.parametrize(
    ("how", "word"), [("crashed", "crashed"), ("panicked", "panicked"), ("watchdog", "watchdog")]
)
def test_an_event_reports_how_a_guest_failed(how: Any, word: str) -> None:
    end = GuestExit(how=how, asked=False, at_ns=1)
    seen = Seen(
        view(UID, state=VmState.FAILED, reason=GUEST_ENDED, failure_stage="guest", last_exit=end)
    )
    ran = put(vmi(), {"status": {"phase": "Running"}})
    *_, event = reconcile_vmi(ran, seen, {}, NOW, CLUSTER)
    assert isinstance(event, RecordEvent)
    assert (event.reason, event.warning, word in event.message) == ("Stopped", True, True)


def test_a_condition_keeps_the_time_of_its_transition() -> None:
    first = status_of(Seen(view(UID, state=VmState.STARTING)))
    later = vmi_said(
        put(vmi(), {"status": first}),
        Seen(view(UID, state=VmState.STARTING, message="soon")),
        NOW + timedelta(minutes=1),
    )
    ready = find(later["conditions"], "Ready")
    assert (ready["lastTransitionTime"], ready["message"]) == (stamp(NOW), "soon")


@pytest.mark.parametrize(("given", "grace_s"), [(None, 30), (0, 0), (5, 5), (10**9, 86_400)])
def test_a_deleted_vmi_stops_its_guest_with_its_grace(given: int | None, grace_s: int) -> None:
    whole = put(vmi({"terminationGracePeriodSeconds": given}), {"metadata.deletionTimestamp": GONE})
    actions = reconcile_vmi(whole, Seen(view(UID, state=VmState.RUNNING)), {}, NOW, CLUSTER)
    assert actions[0] == vmi_rules.delete(UID, grace_s)
    assert RecordEvent("ShuttingDown", "Signaled Graceful Shutdown") in actions


def test_the_finalizer_stays_until_the_vm_is_certainly_gone() -> None:
    whole = put(vmi(), {"metadata.deletionTimestamp": GONE})
    unsure = reconcile_vmi(whole, Seen(), {}, NOW, CLUSTER)
    assert vmi_rules.delete(UID, 30) in unsure
    assert Requeue(vmi_rules.RETRY_S[0]) in unsure, "no event may follow the answer"
    assert not any(isinstance(one, Patch) and "metadata" in one.changes for one in unsure)
    sure = reconcile_vmi(whole, Seen(gone=True), {}, NOW, CLUSTER)
    assert sure[0] == Patch({"metadata": {"finalizers": []}})


def test_a_vmi_that_waits_for_a_secret_is_not_created_on_the_bus() -> None:
    whole = vmi({"volumes.2.cloudInitNoCloud": {"secretRef": {"name": "user"}}})
    again, awaited, write, event = reconcile_vmi(whole, Seen(), {}, NOW, CLUSTER)
    assert again == Requeue(300.0)
    assert awaited == Await(frozenset({Key(SECRET, "default", "user")}))
    assert isinstance(write, Patch)
    found = find(write.changes["status"]["conditions"], "Synchronized")
    assert "Secret user does not exist" in found["message"]
    assert event == RecordEvent("SyncFailed", found["message"], warning=True)


@pytest.mark.parametrize(("code", "after_s"), [(429, 10.0), (409, 10.0), (422, 300.0)])
def test_a_refused_create_is_retried(code: int, after_s: float) -> None:
    seen = Seen(refused=Refused(code=code, reason="why", message="so"))
    create, again, *_ = reconcile_vmi(vmi(), seen, {}, NOW, CLUSTER)
    assert isinstance(create, BusCall)
    assert again == Requeue(after_s)


def test_an_own_vm_is_deleted_if_the_end_of_its_vmi_was_reported() -> None:
    ours, other = view(UID), view(UID, labels={"virtbus.io/cluster": "c2"})
    assert orphans.orphan(ours, "", CLUSTER, ended=True) == vmi_rules.delete(UID)
    for left in (other, view(UID, deleting=True)):
        assert orphans.orphan(left, "", CLUSTER, ended=True) is None
    assert orphans.orphan(ours, UID, CLUSTER, ended=True) is None


@pytest.mark.parametrize(("there", "why"), [("", orphans.NO_VMI), ("another", orphans.OTHER_VMI)])
def test_a_vm_with_an_absent_vmi_is_marked_once_and_never_deleted(there: str, why: str) -> None:
    ours, marked = view(UID), view(UID, annotations={ORPHANED: why})
    assert orphans.orphan(ours, there, CLUSTER, ended=False) == orphans.hold(ours, why)
    assert orphans.orphan(marked, there, CLUSTER, ended=False) is None
    assert orphans.orphan(marked, UID, CLUSTER, ended=False) == orphans.hold(marked, "")


def test_a_created_vm_is_reconciled_again_without_an_event() -> None:
    """A starting bridge sends a create for a running VM whose controller lags."""
    actions = reconcile_vmi(vmi(), Seen(), {}, NOW, CLUSTER)
    assert isinstance(actions[0], BusCall)
    assert any(isinstance(one, Requeue) for one in actions)
