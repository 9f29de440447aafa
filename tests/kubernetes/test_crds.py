"""A real API server accepts KubeVirt's CRDs, and KubeVirt's manifests by them."""

import json

import pytest
import yaml
from tests.e2e.platform import until
from tests.kubernetes.cluster import CRDS, ROOT, Cluster

pytestmark = pytest.mark.kubernetes

MANIFEST = ROOT / "services" / "kubebridge" / "tests" / "kubevirt-smoke-fedora.yaml"
NAME = "kubevirt-smoke-fedora"
VM = f"vm/{NAME}"


def instance(**status: object) -> str:
    """Return a VMI of the manifest's template, as JSON."""
    template = yaml.safe_load(MANIFEST.read_text())["spec"]["template"]
    made = {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "one"},
        "spec": template["spec"],
        **({"status": status} if status else {}),
    }
    return json.dumps(made)


def test_the_definitions_are_applied_twice_without_a_change(kubevirt: Cluster) -> None:
    said = kubevirt.kubectl("apply", "-f", str(CRDS)).splitlines()
    assert len(said) == 3
    assert all(line.endswith(" unchanged") for line in said)


def test_a_manifest_of_kubevirts_is_applied_unchanged_and_again(kubevirt: Cluster) -> None:
    with kubevirt.namespace("smoke") as ns:
        apply = ("apply", "-n", ns, "-f", str(MANIFEST))
        done = kubevirt.try_kubectl(*apply)
        assert (done.stdout, done.stderr) == (f"virtualmachine.kubevirt.io/{NAME} created\n", "")
        made = kubevirt.get("-n", ns, VM)
        assert made["spec"] == yaml.safe_load(MANIFEST.read_text())["spec"]
        assert kubevirt.kubectl(*apply).endswith(" unchanged\n")
        assert kubevirt.kubectl("diff", "-n", ns, "-f", str(MANIFEST)) == ""
        owner = ("--server-side", "--force-conflicts", "--field-manager=other")
        for _ in range(2):
            assert kubevirt.kubectl(*apply, *owner).endswith(" serverside-applied\n")
        assert kubevirt.get("-n", ns, VM)["metadata"]["generation"] == 1


def test_a_field_that_is_not_kubevirts_is_refused_by_its_path(kubevirt: Cluster) -> None:
    with kubevirt.namespace("typo") as ns:
        wrong = MANIFEST.read_text().replace("cores: 1", "coers: 1")
        done = kubevirt.try_kubectl("apply", "-n", ns, "-f", "-", stdin=wrong)
        assert done.returncode != 0
        assert 'unknown field "spec.template.spec.domain.cpu.coers"' in done.stderr


def test_lists_have_kubevirts_columns_and_names(kubevirt: Cluster) -> None:
    with kubevirt.namespace("lists") as ns:
        kubevirt.kubectl("apply", "-n", ns, "-f", str(MANIFEST))
        kubevirt.kubectl("create", "-n", ns, "-f", "-", stdin=instance())
        for names, columns in (
            (("vm", "vms"), "NAME AGE STATUS READY"),
            (("vmi", "vmis"), "NAME AGE PHASE IP NODENAME READY LIVE-MIGRATABLE PAUSED"),
        ):
            for name in names:
                head = kubevirt.kubectl("get", "-n", ns, name, "-o", "wide").splitlines()[0]
                assert head.split() == columns.split()
        both = kubevirt.kubectl("get", "-n", ns, "all", "-o", "name").splitlines()
        assert {line.split("/")[0] for line in both} == {
            "virtualmachine.kubevirt.io",
            "virtualmachineinstance.kubevirt.io",
        }


def test_a_vms_status_is_apart_and_a_vmis_is_written_with_it(kubevirt: Cluster) -> None:
    with kubevirt.namespace("status") as ns:
        kubevirt.kubectl("apply", "-n", ns, "-f", str(MANIFEST))
        ready = ("--type=merge", "-p", '{"status": {"printableStatus": "Running"}}')
        kubevirt.kubectl("patch", "-n", ns, VM, *ready)
        assert kubevirt.get("-n", ns, VM).get("status", {}).get("printableStatus") != "Running"
        kubevirt.kubectl("patch", "-n", ns, VM, "--subresource=status", *ready)
        assert kubevirt.get("-n", ns, VM)["status"]["printableStatus"] == "Running"
        kubevirt.kubectl("create", "-n", ns, "-f", "-", stdin=instance(phase="Running"))
        assert kubevirt.get("-n", ns, "vmi/one")["status"] == {"phase": "Running"}


def test_explain_describes_fields_and_refusals(kubevirt: Cluster) -> None:
    domain = ("explain", "vm.spec.template.spec.domain")
    # The API server publishes a new kind's schema some time after it accepts its objects.
    until(lambda: kubevirt.try_kubectl(*domain).returncode == 0, "documents of the CRDs")
    said = kubevirt.kubectl(*domain)
    assert "Machine that the guest sees." in said
    assert "Number and model of the guest's CPUs." in " ".join(said.split())
    assert "Refused by virtbus" in kubevirt.kubectl("explain", "vm.spec.instancetype")
