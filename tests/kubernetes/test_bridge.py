"""The bridge with a real API server and a real bus: users' actions on VMs, and the results."""

import copy
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.kubernetes.cluster import Json
from tests.kubernetes.platform import SMOKE, Platform, run, until

from virtbus.documents.manifests import NAMESPACE

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(300)]

NAME = "kubevirt-smoke-fedora"
MANIFEST: Json = yaml.safe_load(SMOKE.read_text())


def vm(name: str, **spec: object) -> Json:
    """The smoke manifest under another name."""
    made = copy.deepcopy(MANIFEST)
    made["metadata"]["name"] = name
    made["spec"] |= spec
    return made


@pytest.fixture
def ns(platform: Platform, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace that is empty at the end, on both sides."""
    name = f"b-{abs(hash(request.node.name)) % 10**8}"
    with platform.cluster.namespace(name):
        yield name
        platform.cluster.kubectl("delete", "vm,vmi", "--all", "-n", name, "--timeout=60s")
        until("nothing is left on the bus", lambda: not platform.vms(name))


def phase(platform: Platform, ns: str, name: str) -> str:
    found = platform.find(ns, "vmi", name)
    return str(found["status"]["phase"]) if found and "status" in found else ""


def status(platform: Platform, ns: str, name: str) -> Json:
    found = platform.find(ns, "vm", name)
    return dict(found.get("status", {})) if found else {}


def test_the_seeds_manifest_runs_and_is_deleted(platform: Platform, ns: str) -> None:
    cluster = platform.cluster
    assert "created" in cluster.kubectl("apply", "-n", ns, "-f", str(SMOKE))
    platform.ready(ns, NAME)
    vm, vmi = cluster.get("-n", ns, "vm", NAME), cluster.get("-n", ns, "vmi", NAME)
    said = vm["status"]
    assert (said["printableStatus"], said["ready"], said["created"]) == ("Running", True, True)
    assert (said["runStrategy"], said["observedGeneration"]) == ("Always", 1)
    assert vmi["status"]["phase"] == "Running"
    assert vmi["metadata"]["labels"]["kubevirt.io/nodeName"] == vmi["status"]["nodeName"]
    (owner,) = vmi["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (vm["metadata"]["uid"], True)
    on_bus = platform.vms(ns)[NAME]
    assert on_bus["uid"] == vmi["metadata"]["uid"]
    assert vmi["status"]["interfaces"][0]["ipAddress"] in on_bus["interfaces"][0]["addresses"][0]
    assert "unchanged" in cluster.kubectl("apply", "-n", ns, "-f", str(SMOKE))
    cluster.kubectl("diff", "-n", ns, "-f", str(SMOKE))
    cluster.kubectl("delete", "-n", ns, "-f", str(SMOKE), "--timeout=60s")
    until("the VMI is gone", lambda: platform.find(ns, "vmi", NAME) is None)
    assert platform.vms(ns) == {}


def test_the_kubevirt_object_is_observed_as_soon_as_it_changes(platform: Platform) -> None:
    def observed() -> bool:
        one = platform.cluster.get("-n", NAMESPACE, "kubevirt", "kubevirt")
        return bool(
            one.get("status", {}).get("observedGeneration") == one["metadata"]["generation"]
        )

    manifest = {
        "apiVersion": "kubevirt.io/v1",
        "kind": "KubeVirt",
        "metadata": {"name": "kubevirt"},
        "spec": {"imagePullPolicy": "Always"},
    }
    platform.apply(NAMESPACE, manifest)
    until("the new object is observed", observed)
    platform.apply(NAMESPACE, manifest | {"spec": {"imagePullPolicy": "IfNotPresent"}})
    until("its change is observed", observed)


def test_a_machine_with_1_mib_and_no_disk_runs(platform: Platform, ns: str) -> None:
    bare = vm("bare")
    bare["spec"]["template"]["spec"] = {
        "domain": {"devices": {}, "resources": {"requests": {"memory": "1Mi"}}}
    }
    platform.apply(ns, bare)
    platform.ready(ns, "bare")


def test_an_idle_status_is_not_written(platform: Platform, ns: str) -> None:
    platform.apply(ns, vm("still"))
    platform.ready(ns, "still")
    before = [platform.cluster.get("-n", ns, kind, "still") for kind in ("vm", "vmi")]
    time.sleep(2)
    assert before == [platform.cluster.get("-n", ns, kind, "still") for kind in ("vm", "vmi")]


def test_events_describe_a_users_vm(platform: Platform, ns: str) -> None:
    platform.apply(ns, vm("told"))
    platform.ready(ns, "told")

    def reasons() -> set[str]:
        return {one["reason"] for one in platform.cluster.get("-n", ns, "events")["items"]}

    until("both are told", lambda: reasons() >= {"SuccessfulCreate", "Started"})


def test_run_strategies_are_followed(platform: Platform, ns: str) -> None:
    platform.apply(ns, vm("turned", running=True))
    platform.ready(ns, "turned")
    platform.apply(ns, vm("turned", running=False))
    until("it is stopped", lambda: status(platform, ns, "turned")["printableStatus"] == "Stopped")
    assert platform.find(ns, "vmi", "turned") is None
    assert platform.vms(ns) == {}
    platform.apply(ns, vm("turned", running=True))
    platform.ready(ns, "turned")


def test_vms_that_are_deleted_while_they_start_leave_nothing(platform: Platform, ns: str) -> None:
    many = [vm(f"brief-{number}") for number in range(20)]
    platform.apply(ns, *many)
    platform.cluster.kubectl("delete", "vm", "--all", "-n", ns, "--timeout=60s")
    until("no VMI is left", lambda: not platform.cluster.get("-n", ns, "vmi")["items"])
    assert platform.vms(ns) == {}


def test_external_edits_of_the_bridges_objects_are_reverted(platform: Platform, ns: str) -> None:
    cluster = platform.cluster
    platform.apply(ns, vm("edited"))
    platform.ready(ns, "edited")
    lie = json.dumps({"metadata": {"labels": None, "finalizers": None}, "status": None})
    cluster.kubectl("patch", "vmi", "edited", "-n", ns, "--type=merge", "-p", lie)
    cluster.kubectl(
        *("patch", "vm", "edited", "-n", ns, "--type=merge", "--subresource=status"),
        *("-p", json.dumps({"status": {"printableStatus": "Nonsense", "ready": False}})),
    )

    def mended() -> bool:
        vmi = cluster.get("-n", ns, "vmi", "edited")
        said = status(platform, ns, "edited")
        return (
            "kubevirt.io/nodeName" in vmi["metadata"].get("labels", {})
            and vmi["metadata"].get("finalizers") == ["kubevirt.io/foregroundDeleteVirtualMachine"]
            and vmi.get("status", {}).get("phase") == "Running"
            and (said["printableStatus"], said["ready"]) == ("Running", True)
        )

    until("it says again what is", mended)


def test_a_force_deleted_vmi_ends_its_vm(platform: Platform, ns: str) -> None:
    platform.apply(ns, vm("forced", running=False))
    bare = {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "forced-bare"},
        "spec": MANIFEST["spec"]["template"]["spec"],
    }
    platform.apply(ns, bare)
    until("it runs", lambda: phase(platform, ns, "forced-bare") == "Running")
    os.kill(platform.bridge.pid, signal.SIGSTOP)
    try:
        platform.cluster.kubectl("delete", "vmi", "forced-bare", "-n", ns, "--wait=false")
        none = json.dumps({"metadata": {"finalizers": None}})
        platform.cluster.kubectl(
            "patch", "vmi", "forced-bare", "-n", ns, "--type=merge", "-p", none
        )
        until("it is gone", lambda: platform.find(ns, "vmi", "forced-bare") is None)
        assert platform.vms(ns)["forced-bare"]["state"] == "Running"
    finally:
        os.kill(platform.bridge.pid, signal.SIGCONT)
    until("the sweep has found it", lambda: not platform.vms(ns))


def test_a_vmi_that_an_api_server_lost_ends_no_vm(platform: Platform, ns: str) -> None:
    """Remove it as a restore of an older etcd does: no watch reports a delete (ADR 0033)."""
    bare = {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "lost"},
        "spec": MANIFEST["spec"]["template"]["spec"],
    }
    platform.apply(ns, bare)
    until("it runs", lambda: phase(platform, ns, "lost") == "Running")
    uid = platform.vms(ns)["lost"]["uid"]
    os.kill(platform.bridge.pid, signal.SIGKILL)
    platform.cluster.kubectl("delete", "vmi", "lost", "-n", ns, "--wait=false")
    none = json.dumps({"metadata": {"finalizers": None}})
    platform.cluster.kubectl("patch", "vmi", "lost", "-n", ns, "--type=merge", "-p", none)
    until("it is gone", lambda: platform.find(ns, "vmi", "lost") is None)
    run(platform.bridge.killed_and_ready())

    def marked() -> bool:
        return "virtbus.io/orphaned" in platform.vms(ns)["lost"].get("annotations", {})

    until("its VM is marked", marked)
    platform.apply(ns, bare)

    def told() -> bool:
        said = (platform.find(ns, "vmi", "lost") or {}).get("status", {}).get("conditions", [])
        return any(f"is held by VM {uid}" in one.get("message", "") for one in said)

    until("the new VMI says who holds its name", told)
    found = platform.vms(ns)["lost"]
    assert (found["uid"], found["state"]) == (uid, "Running")
    platform.ask("delete", uid=uid, grace_s=0)
    until("the new one runs", lambda: phase(platform, ns, "lost") == "Running")
    assert platform.vms(ns)["lost"]["uid"] != uid


def test_a_vm_deleted_on_the_bus_is_created_again(platform: Platform, ns: str) -> None:
    platform.apply(ns, vm("again"))
    platform.ready(ns, "again")
    uid = platform.vms(ns)["again"]["uid"]
    platform.ask("delete", uid=uid, grace_s=0)

    def another() -> bool:
        found = platform.vms(ns).get("again")
        return found is not None and found["uid"] != uid and found["state"] == "Running"

    until("another one runs", another)
    platform.ready(ns, "again")


def test_vms_of_others_are_left_unchanged(platform: Platform, ns: str) -> None:
    platform.ask("create", namespace=ns, name="others", image="tiny")
    labels = {"virtbus.io/cluster": "another-cluster"}
    platform.ask("create", namespace=ns, name="anothers", image="tiny", labels=labels)
    platform.apply(ns, vm("others"))
    until(
        "it says who has its name",
        lambda: "FailedCreate" in json.dumps(platform.find(ns, "vmi", "others")),
    )
    platform.cluster.kubectl("delete", "vm", "others", "-n", ns, "--timeout=60s")
    time.sleep(1)
    assert set(platform.vms(ns)) == {"others", "anothers"}
    for name in ("others", "anothers"):
        platform.ask("delete", namespace=ns, name=name)


def test_annotations_beyond_their_bound_reach_no_vmi_and_block_nothing(
    platform: Platform, ns: str
) -> None:
    sizes = {"large": 1_000_000, "too-large": 1_450_000}
    for name, size in sizes.items():
        made = vm(name)
        # A template's annotations may be longer than those of an object, which are limited to 256
        # KiB.
        made["spec"]["template"]["metadata"]["annotations"]["note"] = "x" * size
        platform.cluster.kubectl("create", "-n", ns, "-f", "-", stdin=json.dumps(made))
    for name in sizes:
        platform.ready(ns, name)
        made_vmi = platform.cluster.get("-n", ns, "vmi", name)
        assert "note" not in made_vmi["metadata"]["annotations"]
        said = platform.cluster.get("-n", ns, "vm", name)["status"]["conditions"]
        (dropped,) = (one for one in said if one["type"] == "AnnotationsDropped")
        assert dropped["reason"] == "AnnotationsTooLarge"
    platform.apply(ns, vm("small"))
    platform.ready(ns, "small")
    platform.cluster.kubectl("delete", "vm", "--all", "-n", ns, "--timeout=60s")


def test_a_start_waits_for_its_secret(platform: Platform, ns: str) -> None:
    made = vm("secretive")
    volumes = made["spec"]["template"]["spec"]["volumes"]
    volumes[-1]["cloudInitNoCloud"] = {"secretRef": {"name": "seed"}}
    platform.apply(ns, made)
    until("it says what it waits for", lambda: "Secret seed does not exist" in json.dumps(
        (platform.find(ns, "vmi", "secretive") or {}).get("status", {})))  # fmt: skip
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "seed"}}
    platform.apply(ns, {**secret, "stringData": {"userdata": "#cloud-config\n"}})
    platform.ready(ns, "secretive")


def test_a_restarted_bridge_handles_missed_changes(platform: Platform, ns: str) -> None:
    platform.apply(ns, vm("stays"), vm("goes"))
    platform.ready(ns, "stays")
    platform.ready(ns, "goes")
    uid = platform.vms(ns)["stays"]["uid"]
    os.kill(platform.bridge.pid, signal.SIGKILL)
    platform.apply(ns, vm("comes"))
    platform.cluster.kubectl("delete", "vm", "goes", "-n", ns, "--wait=false")
    run(platform.bridge.killed_and_ready())
    platform.ready(ns, "comes")
    until("the one is gone", lambda: set(platform.vms(ns)) == {"stays", "comes"})
    assert platform.vms(ns)["stays"]["uid"] == uid


def test_another_bridge_takes_over_within_seconds(platform: Platform, ns: str) -> None:
    other = platform.another("bridge-2")
    other.start()
    try:
        run(other.ready())
        os.kill(platform.bridge.pid, signal.SIGSTOP)
        began = time.monotonic()
        platform.apply(ns, vm("taken-over"))
        platform.ready(ns, "taken-over")
        assert time.monotonic() - began < 30
        os.kill(platform.bridge.pid, signal.SIGCONT)
        platform.apply(ns, vm("after"))
        platform.ready(ns, "after")
    finally:
        os.kill(platform.bridge.pid, signal.SIGCONT)
        other.stop()
    platform.apply(ns, vm("given-back"))
    platform.ready(ns, "given-back")


def collected(platform: Platform, ns: str) -> None:
    """Wait until Kubernetes' garbage collector knows VMIs: it discovers kinds twice a minute.

    Before that it does not treat a VMI as a dependent of a VM, and deletes it once the VM is
    gone.
    """
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "none", "uid": "none"}
    bare = {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "collected", "ownerReferences": [owner]},
        "spec": MANIFEST["spec"]["template"]["spec"],
    }
    platform.apply(ns, bare)
    gone = "its owner is not there, so it goes"
    until(gone, lambda: platform.find(ns, "vmi", "collected") is None, timeout_s=90)


def test_an_orphaned_vmi_continues(platform: Platform, ns: str) -> None:
    collected(platform, ns)
    platform.apply(ns, vm("left"))
    platform.ready(ns, "left")
    platform.cluster.kubectl("delete", "vm", "left", "-n", ns, "--cascade=orphan", "--timeout=60s")
    vmi = platform.cluster.get("-n", ns, "vmi", "left")
    until("it has no owner", lambda: "ownerReferences" not in
          platform.cluster.get("-n", ns, "vmi", "left")["metadata"])  # fmt: skip
    assert vmi["status"]["phase"] == "Running"
    assert platform.vms(ns)["left"]["state"] == "Running"
    platform.cluster.kubectl("delete", "vmi", "left", "-n", ns, "--timeout=60s")
    assert platform.vms(ns) == {}


def test_the_bridge_logs_no_unexpected_warning(platform: Platform) -> None:
    """The earlier tests log at INFO, except for messages that a person should see."""
    told = [json.loads(line) for line in platform.bridge.complaints() if line.startswith("{")]
    known = {"orphan", "orphan_held", "lease_lost", "refused"}
    assert [line for line in told if line.get("code") not in known] == []
    assert Path(platform.bridge.log).exists()
