"""Admission as kubectl shows it: defaults, all problems at once, and deletes that never wait."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from services.kubebridge.tests.manifests import SEED, template
from tests.e2e.platform import until
from tests.kubernetes.cluster import ROOT, Cluster
from tests.kubernetes.installed import installed
from tests.kubernetes.serving import Webhooks

from virtbus.kubebridge.core.objects.metadata import VM_FINALIZER, VMI_FINALIZER
from virtbus.kubebridge.core.runtime import controller as kinds
from virtbus.kubebridge.core.translation.defaults import of_vm, of_vmi
from virtbus.kubebridge.edge.admission import MUTATE, VALIDATE
from virtbus.kubebridge.edge.cluster import connect

pytestmark = pytest.mark.kubernetes

MANIFEST = ROOT / "services" / "kubebridge" / "tests" / "kubevirt-smoke-fedora.yaml"
NAME = SEED["metadata"]["name"]
VM = f"vm/{NAME}"
WAITS = "waits.kubevirt.io/test"

Json = dict[str, Any]


class Admitting(NamedTuple):
    """A cluster whose webhooks answer, and the kubeconfig of the bridge's service account."""

    cluster: Cluster
    webhooks: Webhooks
    bridge: Path

    def calls(self) -> tuple[int, int]:
        """Return the number of calls of each webhook so far: mutating, validating."""
        return self.webhooks.asked[MUTATE], self.webhooks.asked[VALIDATE]


@pytest.fixture(scope="module")
def admitting(kubevirt: Cluster) -> Iterator[Admitting]:
    webhooks = Webhooks()
    with installed(kubevirt, webhooks.port) as bridge, webhooks.serving(bridge):
        until(lambda: applied(kubevirt, "default", smoke()).returncode == 0, "the webhooks")
        kubevirt.kubectl("delete", VM, "--wait=false")
        ended(kubevirt, "default", VM)
        yield Admitting(kubevirt, webhooks, bridge)


def smoke() -> str:
    return MANIFEST.read_text()


def applied(cluster: Cluster, ns: str, text: str, *options: str) -> Any:
    return cluster.try_kubectl("apply", *options, "-n", ns, "-f", "-", stdin=text)


def ended(cluster: Cluster, ns: str, name: str) -> None:
    """Remove the finalizer, as the bridge does at the end."""
    free = ("--type=merge", "-p", '{"metadata": {"finalizers": null}}')
    cluster.kubectl("patch", "-n", ns, name, *free)
    cluster.kubectl("wait", "-n", ns, "--for=delete", name, "--timeout=60s")


def instance(name: str = "one") -> str:
    spec = SEED["spec"]["template"]["spec"]
    kind = {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance"}
    return json.dumps({**kind, "metadata": {"name": name}, "spec": spec})


def test_a_vm_is_stored_with_its_defaults_and_applied_again_unchanged(admitting: Admitting) -> None:
    cluster = admitting.cluster
    with cluster.namespace("admitted") as ns:
        before = admitting.calls()
        assert applied(cluster, ns, smoke()).stdout.endswith(" created\n")
        assert admitting.calls() == (before[0] + 1, before[1] + 1)
        made = cluster.get("-n", ns, VM)
        assert made["spec"] == of_vm(SEED)["spec"]
        assert made["metadata"]["finalizers"] == [VM_FINALIZER]
        assert applied(cluster, ns, smoke()).stdout.endswith(" unchanged\n")
        assert cluster.kubectl("diff", "-n", ns, "-f", str(MANIFEST)) == ""
        owner = ("--server-side", "--force-conflicts", "--field-manager=other")
        for _ in range(2):
            assert applied(cluster, ns, smoke(), *owner).stdout.endswith(" serverside-applied\n")
        assert cluster.get("-n", ns, VM)["metadata"]["generation"] == 1
        cluster.kubectl("delete", "-n", ns, VM, "--wait=false")
        ended(cluster, ns, VM)


def test_all_problems_are_shown_at_once(admitting: Admitting) -> None:
    broken = template(
        {
            "domain.devices.disks.3": {"name": "other", "disk": {}},
            "domain.devices.disks.0.bootOrder": 1,
            "domain.devices.disks.1.bootOrder": 1,
            "domain.launchSecurity": {"sev": {}},
        }
    )
    broken["spec"]["runStrategy"] = "Sometimes"
    broken["metadata"] = {"name": "broken"}
    with admitting.cluster.namespace("broken") as ns:
        done = applied(admitting.cluster, ns, yaml.safe_dump(broken))
        assert done.returncode != 0
        first, *told = done.stderr.rstrip().splitlines()
        assert 'The VirtualMachine "broken" is invalid' in first, done.stderr
        assert [line.removeprefix("* ").split(": ")[0] for line in told] == [
            "spec.running",
            "spec.template.spec.domain.devices.disks[3].name",
            "spec.template.spec.domain.devices.disks[1].bootOrder",
            "spec.runStrategy",
            "spec.template.spec.domain.launchSecurity",
        ]


def test_the_spec_of_a_vmi_is_immutable(admitting: Admitting) -> None:
    cluster = admitting.cluster
    with cluster.namespace("instances") as ns:
        assert applied(cluster, ns, instance()).stdout.endswith(" created\n")
        made = cluster.get("-n", ns, "vmi/one")
        assert made["spec"] == of_vmi(json.loads(instance()))["spec"]
        assert made["metadata"]["finalizers"] == [VMI_FINALIZER]
        change = ("patch", "-n", ns, "vmi/one", "--type=merge", "-p")
        refused = cluster.try_kubectl(*change, '{"spec": {"hostname": "other"}}')
        assert "update of VMI object is restricted" in refused.stderr
        claimed = '{"status": {"phase": "Failed"}, "metadata": {"labels": {"mine": "yes"}}}'
        cluster.kubectl(*change, claimed)
        now = cluster.get("-n", ns, "vmi/one")
        assert (now.get("status"), now["metadata"]["labels"]) == (None, {"mine": "yes"})
        cluster.kubectl("delete", "-n", ns, "vmi/one", "--wait=false")
        ended(cluster, ns, "vmi/one")


async def writes(kubeconfig: Path, ns: str) -> None:
    """The bridge's writes of a VM and its VMI, by its own client."""
    async with connect(kubeconfig) as cluster:
        await cluster.create(kinds.VMI, json.loads(instance()), ns)
        await cluster.patch(kinds.VMI, "one", {"status": {"phase": "Running"}}, ns)
        await cluster.patch(kinds.VM, NAME, {"status": {"ready": True}}, ns, "status")
        await cluster.patch(kinds.VM, NAME, {"spec": {"running": False}}, ns)


def test_no_webhook_is_called_for_the_bridges_own_writes(admitting: Admitting) -> None:
    cluster = admitting.cluster
    with cluster.namespace("own") as ns:
        applied(cluster, ns, smoke())
        before = admitting.calls()
        asyncio.run(writes(admitting.bridge, ns))
        assert admitting.calls() == before
        assert cluster.get("-n", ns, "vmi/one")["status"] == {"phase": "Running"}
        cluster.kubectl("label", "-n", ns, VM, "a=b")
        assert admitting.calls() == (before[0] + 1, before[1]), "a label needs no rule"
        cluster.kubectl("delete", "-n", ns, VM, "vmi/one", "--wait=false")
        ended(cluster, ns, VM)


def test_a_megabyte_of_annotations_is_refused_with_its_bound(admitting: Admitting) -> None:
    cluster = admitting.cluster
    with cluster.namespace("large") as ns:
        applied(cluster, ns, smoke())
        large = {f"note-{index}": "x" * 1000 for index in range(1000)}
        body = json.dumps({"spec": {"template": {"metadata": {"annotations": large}}}})
        merge = ("--type=merge", "--patch-file=/dev/stdin")
        refused = cluster.try_kubectl("patch", "-n", ns, VM, *merge, stdin=body)
        assert refused.returncode != 0
        assert "spec.template.metadata.annotations" in refused.stderr
        assert "at most 16384" in refused.stderr
        fitting = {name: large[name] for name in list(large)[:15]}
        body = json.dumps({"spec": {"template": {"metadata": {"annotations": fitting}}}})
        cluster.kubectl("patch", "-n", ns, VM, *merge, stdin=body)
        kept = cluster.get("-n", ns, VM)["spec"]["template"]["metadata"]["annotations"]
        assert kept.items() >= fitting.items()
        cluster.kubectl("delete", "-n", ns, VM, "--wait=false")
        ended(cluster, ns, VM)


def test_without_a_bridge_creates_wait_and_deletes_end(kubevirt: Cluster) -> None:
    """The webhooks are registered, but no server answers."""
    gone = Webhooks()
    gone.socket.close()
    with kubevirt.namespace("unanswered") as ns:
        kubevirt.kubectl("create", "-n", ns, "-f", str(MANIFEST))
        kubevirt.kubectl("create", "-n", ns, "-f", "-", stdin=instance())
        hold = ("--type=merge", "-p", json.dumps({"metadata": {"finalizers": [WAITS]}}))
        for name in (VM, "vmi/one"):
            kubevirt.kubectl("patch", "-n", ns, name, *hold)
        with installed(kubevirt, gone.port):
            refused = until(
                lambda: (done := applied(kubevirt, ns, instance("two"))).returncode and done.stderr,
                "the webhooks",
            )
            assert "failed calling webhook" in str(refused)
            for name in (VM, "vmi/one"):
                kubevirt.kubectl("delete", "-n", ns, name, "--wait=false")
                ended(kubevirt, ns, name)
