"""Each verb of the aggregated API: preconditions, refusals and effects."""

from typing import Any

import pytest
from services.kubebridge.tests.manifests import UID, put, vm, vmi
from services.kubebridge.tests.world import World, world

from virtbus.kubebridge.core.api import guest_answers
from virtbus.kubebridge.core.api.discovery import api_group, api_resources
from virtbus.kubebridge.core.api.subresources import BY_NAME, VERBS, answer
from virtbus.kubebridge.core.objects.status_errors import Cause, Refusal, invalid
from virtbus.kubebridge.core.runtime.subresource_effects import (
    VM,
    VMI,
    AskGuest,
    BusVerb,
    Effect,
    Give,
    GuestStream,
    JsonPatch,
    SubresourceCall,
    Verb,
)
from virtbus.schemas.guest import GuestFilesystem, GuestInfo, GuestOs, GuestUser

OWN_VM: dict[str, Any] = {"kind": "VM"}


def running(phase: str = "Running", **conditions: bool) -> dict[str, Any]:
    listed = [{"type": kind, "status": str(on)} for kind, on in conditions.items()]
    return put(vmi(), {"status": {"phase": phase, "conditions": listed}})


def by(strategy: str, **status: Any) -> dict[str, Any]:
    return put(vm(running=None, runStrategy=strategy), {"status": status})


def ask(
    name: str, of: Any = None, its: Any = None, resource: str = "", **options: Any
) -> Refusal | tuple[Effect, ...]:
    kind = resource or (VM if of is not None else VMI)
    method = BY_NAME[kind, name].method
    return answer(SubresourceCall(method, kind, name, "smoke", of, its, options))


def said(outcome: Refusal | tuple[Effect, ...]) -> tuple[int, str]:
    assert isinstance(outcome, Refusal)
    status = outcome.plain()
    assert (status["kind"], status["code"], status["status"]) == ("Status", outcome.code, "Failure")
    return outcome.code, outcome.message.partition('": ')[2] or outcome.message


NO_DISPLAY = {"spec": {"domain": {"devices": {"autoattachGraphicsDevice": False}}}}
NOT_RUNNING, VMI_NOT_RUNNING = (409, "VM is not running"), (409, "VMI is not running")
REFUSED: list[tuple[str, Any, Any, dict[str, Any], tuple[int, str]]] = [
    ("start", by("Always"), running(), {}, (409, "VM is already running")),
    ("start", by("Manual"), running("Pending"), {}, (409, "VM is already running")),
    ("start", by("Always"), None, {}, (409, "Always does not support manual start requests")),
    ("start", by("Once"), running("Failed"), {},
     (409, "Once does not support manual start requests")),
    ("start", by("RerunOnFailure"), running("Failed"), {},
     (409, "RerunOnFailure does not support starting VM from failed state")),
    ("start", by("Manual", stateChangeRequests=[{"action": "Start"}]), None, {},
     (409, "unable to complete request: stop/start already underway")),
    ("stop", by("Halted"), None, {}, NOT_RUNNING),
    ("stop", by("Manual"), running("Succeeded"), {}, NOT_RUNNING),
    ("stop", by("RerunOnFailure"), None, {}, NOT_RUNNING),
    ("stop", by("Halted"), running(), {},
     (409, "Halted only supports manual stop requests with a shorter graceperiod")),
    ("stop", by("Manual"), running(), {"gracePeriod": -1},
     (400, "gracePeriod has to be greater or equal to 0")),
    ("stop", by("Manual"), running(), {"gracePeriod": "1"},
     (400, "gracePeriod must be a whole number of seconds")),
    ("restart", by("Halted"), running(), {},
     (409, "RunStategy Halted does not support manual restart requests")),
    ("restart", by("Once"), running(), {},
     (409, "RunStategy Once does not support manual restart requests")),
    ("restart", by("Always"), None, {}, (409, "VM is not running: Halted")),
    ("restart", by("Always"), running(), {"gracePeriodSeconds": 5},
     (400, "For force restart, only gracePeriod=0 is supported for now")),
    ("restart", by("Always"), running(), {"gracePeriodSeconds": -5},
     (400, "gracePeriod has to be greater or equal to 0")),
    ("pause", None, running("Scheduled"), {}, NOT_RUNNING),
    ("pause", None, running(Paused=True), {}, (409, "VMI is already paused")),
    ("unpause", None, running("Failed"), {}, VMI_NOT_RUNNING),
    ("unpause", None, running(), {}, (409, "VMI is not paused")),
    ("reset", None, running("Succeeded"), {}, VMI_NOT_RUNNING),
    ("softreboot", None, running("Pending"), {}, NOT_RUNNING),
    ("softreboot", None, running(Paused=True), {}, (409, "VMI is paused")),
    ("freeze", None, running("Scheduled"), {}, VMI_NOT_RUNNING),
    ("freeze", None, running(Paused=True), {}, (409, "VMI is paused")),
    *(
        ("freeze", None, running(), {"unfreezeTimeout": wrong},
         (400, "unfreezeTimeout must be a duration of at most 3600s"))
        for wrong in ("", "5", "-1s", "1h1s", "9" * 99 + "s", "1s" * 40, 7, ["1s"])
    ),
    ("unfreeze", None, running("Succeeded"), {}, VMI_NOT_RUNNING),
    ("unfreeze", None, running(Paused=True), {}, (409, "VMI is paused")),
    ("console", None, running("Scheduled"), {}, (400, "VMI is not running")),
    ("console", None, running("Failed"), {}, (409, "VMI is in failed status")),
    ("vnc", None, running("Scheduled"), {}, (400, "VMI is not running")),
    ("vnc", None, put(running(), NO_DISPLAY), {}, (400, "No graphics devices are present.")),
    ("vnc/screenshot", None, put(running(), NO_DISPLAY), {},
     (400, "No graphics devices are present.")),
    ("portforward", None, running("Pending"), {"port": 22}, VMI_NOT_RUNNING),
    ("portforward", None, running(Paused=True), {"port": 22}, (409, "VMI is paused")),
    ("portforward", None, running(), {}, (400, "port must not be empty")),
    ("portforward", None, running(), {"port": "٣"}, (400, "port '٣' is not valid; write 1-65535")),
    ("portforward", None, running(), {"port": 65536},
     (400, "port '65536' is not valid; write 1-65535")),
    ("portforward", None, running(), {"port": 1, "protocol": "sctp"},
     (400, "protocol 'sctp' is not supported; write tcp or udp")),
    ("portforward", by("Always"), None, {"port": 22}, (409, "VMI is not started")),
    ("guestosinfo", None, running("Scheduled"), {}, VMI_NOT_RUNNING),
    ("userlist", None, running(), {}, (409, "VMI does not have guest agent connected")),
    ("filesystemlist", None, running(), {}, (409, "VMI does not have guest agent connected")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "of", "its", "options", "expected"), REFUSED)
def test_an_impossible_verb_is_refused_in_kubevirts_words(
    name: str, of: Any, its: Any, options: dict[str, Any], expected: tuple[int, str]
) -> None:
    assert said(ask(name, of, its, **options)) == expected


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb.missing], ids=lambda v: v.name)
def test_an_unsupported_verb_names_the_missing_feature(verb: Verb) -> None:
    outcome = answer(SubresourceCall(verb.method, verb.resource, verb.name, "smoke", vm(), vmi()))
    assert isinstance(outcome, Refusal)
    assert (outcome.code, outcome.reason) == (501, "NotImplemented")
    assert outcome.message.startswith(f"{verb.name} is not supported yet: ")


@pytest.mark.parametrize("verb", [verb for verb in VERBS if not verb.missing], ids=lambda v: v.name)
def test_a_verb_of_a_missing_object_is_404(verb: Verb) -> None:
    outcome = answer(SubresourceCall(verb.method, verb.resource, verb.name, "smoke"))
    assert isinstance(outcome, Refusal)
    kind = verb.resource.removesuffix("s")
    assert (outcome.code, outcome.message) == (404, f'{kind}.kubevirt.io "smoke" not found')


def test_an_unknown_verb_or_method_is_refused() -> None:
    assert said(answer(SubresourceCall("PUT", VM, "fly", "smoke", vm())))[0] == 404
    assert said(answer(SubresourceCall("GET", VM, "start", "smoke", vm())))[0] == 405


@pytest.mark.parametrize(
    ("name", "its", "options", "effect"),
    [
        ("pause", running(), {}, BusVerb("pause", UID)),
        ("unpause", running(Paused=True), {}, BusVerb("unpause", UID)),
        ("reset", running(), {}, BusVerb("reset", UID)),
        ("softreboot", running(), {}, BusVerb("soft-reboot", UID)),
        ("freeze", running(), {}, BusVerb("freeze", UID, 300)),
        ("freeze", running(), {"unfreezeTimeout": "1m30.5s"}, BusVerb("freeze", UID, 91)),
        ("freeze", running(), {"unfreezeTimeout": "0s"}, BusVerb("freeze", UID, 3600)),
        ("unfreeze", running(), {}, BusVerb("thaw", UID)),
        ("console", running(), {}, GuestStream("console", UID)),
        ("vnc", running(), {}, GuestStream("vnc", UID)),
        ("vnc/screenshot", running(), {}, GuestStream("screenshot", UID)),
        ("portforward", running(), {"port": "22"}, GuestStream("portforward", UID, 22, "tcp")),
        ("portforward", running(), {"port": 53, "protocol": "udp"},
         GuestStream("portforward", UID, 53, "udp")),
    ],
)  # fmt: skip
def test_a_verb_of_a_vmi_becomes_a_verb_of_the_bus(
    name: str, its: Any, options: dict[str, Any], effect: Effect
) -> None:
    assert ask(name, None, its, **options) == (effect,)
    if isinstance(effect, BusVerb):
        assert ask(name, None, its, dryRun=["All"], **options) == ()


@pytest.mark.parametrize("name", ["guestosinfo", "userlist", "filesystemlist"])
def test_guest_agent_verbs_ask_the_guest(name: str) -> None:
    outcome = ask(name, None, running(AgentConnected=True))
    assert isinstance(outcome, tuple)
    assert isinstance(outcome[0], AskGuest)


def test_a_vm_without_instance_types_is_expanded_already() -> None:
    whole = vm()
    assert ask("expand-spec", whole) == (Give(whole),)


# --- start, stop, restart ------------------------------------------------------------------------
def patched(outcome: Refusal | tuple[Effect, ...]) -> list[tuple[str, str, Any]]:
    """Return the object, path and value of each patch, without the tests of patches."""
    assert not isinstance(outcome, Refusal)
    patches = [effect for effect in outcome if isinstance(effect, JsonPatch)]
    assert len(patches) == len(outcome)
    return [
        (patch.of, operation["path"], operation["value"])
        for patch in patches
        for operation in patch.operations
        if operation["op"] != "test"
    ]


STOP, START = {"action": "Stop", "uid": UID}, {"action": "Start"}
REQUESTS = "/status/stateChangeRequests"
GRACE = "/spec/terminationGracePeriodSeconds"


@pytest.mark.parametrize(
    ("name", "of", "its", "options", "expected"),
    [
        ("start", vm(running=False), None, {}, [("vm", "/spec/running", True)]),
        ("start", by("Halted"), None, {}, [("vm", "/spec/runStrategy", "Always")]),
        ("start", by("Halted"), None, {"paused": True},
         [("vm/status", REQUESTS, [{**START, "data": {"paused": "true"}}])]),
        ("start", by("Manual"), None, {}, [("vm/status", REQUESTS, [START])]),
        ("start", by("Manual"), running("Failed"), {}, [("vm/status", REQUESTS, [STOP, START])]),
        ("start", by("RerunOnFailure"), running("Succeeded"), {},
         [("vm/status", REQUESTS, [STOP, START])]),
        ("start", vm(running=None, runStrategy="Manual"), None, {},
         [("vm/status", "/status", {"stateChangeRequests": [START]})]),
        ("stop", vm(), running(), {}, [("vm", "/spec/running", False)]),
        ("stop", by("Once"), None, {}, [("vm", "/spec/runStrategy", "Halted")]),
        ("stop", by("Manual"), running(), {"gracePeriod": 0},
         [("vmi", GRACE, 0), ("vm/status", REQUESTS, [STOP])]),
        ("stop", by("Halted"), put(running(), {"spec.terminationGracePeriodSeconds": 30}),
         {"gracePeriod": 5}, [("vmi", GRACE, 5), ("vm/status", REQUESTS, [STOP])]),
        ("stop", by("Manual", stateChangeRequests=[START]), running(), {},
         [("vm/status", REQUESTS, [STOP])]),
        ("restart", by("Always"), running(), {}, [("vm/status", REQUESTS, [STOP, START])]),
        ("restart", by("Manual"), running(), {"gracePeriodSeconds": 0},
         [("vmi", GRACE, 1), ("vm/status", REQUESTS, [STOP, START])]),
    ],
)  # fmt: skip
def test_a_verb_of_a_vm_becomes_a_patch(
    name: str, of: Any, its: Any, options: dict[str, Any], expected: Any
) -> None:
    assert patched(ask(name, of, its, **options)) == expected
    assert patched(ask(name, of, its, dryRun=["All"], **options)) == expected


def test_a_concurrent_change_is_a_conflict() -> None:
    outcome = ask("stop", vm(), running())
    assert isinstance(outcome, tuple)
    patch = outcome[0]
    assert isinstance(patch, JsonPatch)
    assert patch.operations[0] == {"op": "test", "path": "/spec/running", "value": True}


def asks(w: World, name: str, **options: Any) -> None:
    """Execute a verb: apply its patches to the world."""
    outcome = ask(name, w.vm, w.vmi, VM, **options)
    assert not isinstance(outcome, Refusal), outcome.message
    for effect in outcome:
        assert isinstance(effect, JsonPatch)
        value = effect.operations[-1]["value"]
        path = effect.operations[-1]["path"].strip("/").split("/")
        if effect.of == "vmi":
            assert w.vmi is not None
            w.vmi["spec"]["terminationGracePeriodSeconds"] = value
        elif effect.of == "vm":
            w.user(**{path[-1]: value})
        else:
            w.asks(*(value if isinstance(value, list) else value["stateChangeRequests"]))


@pytest.mark.parametrize("strategy", ["Halted", "Manual"])
def test_a_vm_can_be_started_stopped_and_restarted(strategy: str) -> None:
    w = world(running=None, runStrategy=strategy)
    w.settle()
    asks(w, "start")
    w.settle()
    assert (w.made, w.printable) == (1, "Running")
    asks(w, "stop", gracePeriod=0)
    w.settle()
    assert (w.made, w.printable) == (1, "Stopped")
    asks(w, "start", paused=True)
    w.settle()
    assert w.made == 2
    asks(w, "restart", gracePeriodSeconds=0)
    w.settle()
    assert (w.made, w.printable) == (3, "Running")


# --- discovery and answers -----------------------------------------------------------------------
def test_discovery_lists_each_verb_with_its_rbac_verb() -> None:
    assert api_group()["preferredVersion"]["version"] == "v1"
    listed = {one["name"]: one["verbs"] for one in api_resources("v1")["resources"]}
    assert len(listed) == len(VERBS) + 1  # expand-vm-spec has no object
    assert listed["virtualmachines/start"] == ["update"]
    assert listed["virtualmachineinstances/console"] == ["get"]


def test_a_webhooks_refusal_has_its_causes() -> None:
    cause = Cause("spec.running", "no")
    status = invalid("virtualmachine", "smoke", [cause]).plain()
    assert (status["code"], status["reason"]) == (422, "Invalid")
    assert status["details"]["causes"] == [cause.plain()]


def test_guest_agent_answers_have_kubevirts_format() -> None:
    info = GuestInfo(
        hostname="box",
        os=GuestOs(id="debian", timezone="CET", utc_offset_s=3600),
        users=(GuestUser(name="root", login_time_s=1.5),),
        filesystems=(GuestFilesystem(name="vda1", mountpoint="/", type="ext4", used_bytes=5),),
    )
    whole = guest_answers.os_info(info)
    assert (whole["hostname"], whole["timezone"]) == ("box", "CET, 3600")
    user, disk = guest_answers.users(info)["items"][0], guest_answers.filesystems(info)["items"][0]
    assert user == {"userName": "root", "domain": "", "loginTime": 1.5}
    assert disk == {
        "diskName": "vda1",
        "mountPoint": "/",
        "fileSystemType": "ext4",
        "usedBytes": 5,
        "totalBytes": 0,
    }
    assert whole["userList"] == [user]
    assert whole["fsInfo"] == {"disks": [disk]}
