"""The time from a pod's creation to Running: a VM against a container, on one node."""

import statistics
import sys
import time
from pathlib import Path

import libvirt
import pytest
from tests.bench.rawvirt import RawVirt
from tests.e2e.platform import HALT
from tests.kubernetes.container_host import NAME
from tests.kubernetes.pod_node import Json, PodNode, box, guest

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(900),
]

ROUNDS = 9
BOUND = 1.3
LOOK_S = 0.02


def test_a_vm_pod_runs_within_a_third_more_than_a_container_and_a_raw_start(
    pod_node: PodNode, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each round makes a container, a VM pod and a domain of plain libvirt, in turns."""
    with pod_node.apart("speed") as own:
        vm_pod = guest("vm-first", vm={"image": f"virtlet.cloud/{HALT}"}, **_PLACED)
        _running_s(own, vm_pod)
        raw = _raw(own)
        _running_s(own, _box("box-first"))
        containers, vms, starts = [], [], []
        for turn in range(ROUNDS):
            containers.append(_running_s(own, _box(f"box-{turn}")))
            image = {"image": f"virtlet.cloud/{HALT}"}
            vms.append(_running_s(own, guest(f"vm-{turn}", vm=image, **_PLACED)))
            took, domain = raw.start(raw.prepare())
            raw.destroy(domain)
            starts.append(took)
    floors = [one + start for one, start in zip(containers, starts, strict=True)]
    ratio = statistics.median(vms) / statistics.median(floors)
    words = {"container": containers, "raw start": starts, "VM pod": vms}
    told = ", ".join(f"{name} {statistics.median(took):.3f} s" for name, took in words.items())
    with capsys.disabled():
        sys.stdout.write(f"\npod to Running: {told}; a VM pod takes {ratio:.2f} of both others\n")
    assert ratio <= BOUND, told


_PLACED: Json = {"nodeName": NAME, "terminationGracePeriodSeconds": 0}
"""Without the time of a scheduler."""


def _box(name: str) -> Json:
    pod = box(name)
    pod["spec"] |= _PLACED
    return pod


def _running_s(own: PodNode, pod: Json) -> float:
    """Create a pod; return the seconds until the API server says that it is Running."""
    path = f"/api/v1/namespaces/{own.namespace}/pods"
    name = pod["metadata"]["name"]
    began = time.monotonic()
    own.cluster.send("POST", path, pod)
    while own.cluster.send("GET", f"{path}/{name}")["status"].get("phase") != "Running":
        assert time.monotonic() - began < 120, own.events(name)
        time.sleep(LOOK_S)
    took = time.monotonic() - began
    own.delete(name)
    return took


def _raw(own: PodNode) -> RawVirt:
    """Return plain libvirt with the domain of a VM pod, which is deleted then."""
    own.apply(guest("template", vm={"image": f"virtlet.cloud/{HALT}"}, **_PLACED))
    own.wait("condition=Ready", "pod/template")
    named = "io.kubernetes.pod.name"
    (vm,) = [one for one in own.vms() if one["labels"][named] == "template"]
    connection = libvirt.open("qemu:///system")
    xml = connection.lookupByUUIDString(vm["uid"]).XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)
    folder = Path(own.platform.base, "raw")
    folder.mkdir()
    folder.chmod(0o777)
    raw = RawVirt(folder, xml)
    raw.destroy(raw.start(raw.prepare())[1])
    own.delete("template")
    return raw
