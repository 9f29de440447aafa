"""Statistics come from the node, and one pod without values costs the others nothing."""

import json
import os
from pathlib import Path

import pytest
from cri_api.v1 import api_pb2
from grpc import StatusCode
from services.cri.tests.world import Fleet, Kubelet

from virtbus.cri.core.metrics import METRICS, descriptors, of_sandbox
from virtbus.cri.core.stats import with_network
from virtbus.cri.edge.guest_traffic import KINDS, GuestTraffic
from virtbus.cri.edge.guest_usage import GuestUsage, Usage
from virtbus.schemas.nic_names import host_link

UID = "019ab000-0000-7000-8000-000000000001"


@pytest.fixture
def usage(tmp_path: Path) -> GuestUsage:
    """A host with one emulator, process 42, and its disk."""
    process = tmp_path / "proc" / "42"
    process.mkdir(parents=True)
    (process / "cmdline").write_bytes(b"/usr/bin/qemu\0-name\0guest=vb-" + UID.encode() + b"\0")
    (process / "stat").write_text("42 (CPU 0) TCG) S " + "1 " * 10 + "300 200 " + "0 " * 30)
    (process / "statm").write_text("9000 100 10 1 0 1 0\n")
    (tmp_path / "libvirt").mkdir()
    (tmp_path / "libvirt" / f"vb-{UID}.pid").write_text("42\n")
    disk = tmp_path / "disks" / UID / "root.qcow2"
    disk.parent.mkdir(parents=True)
    disk.write_bytes(b"x" * 8192)
    disk.with_name("cache-disk.qcow2").write_bytes(b"x" * 8192)
    return GuestUsage(tmp_path / "libvirt", tmp_path / "disks", tmp_path / "proc")


def test_a_guest_uses_what_its_emulator_and_its_disks_use(usage: GuestUsage) -> None:
    found = usage.of(UID)
    assert found.cpu_ns == 500 * 10**9 // os.sysconf("SC_CLK_TCK")
    assert found.memory_bytes == 100 * os.sysconf("SC_PAGE_SIZE")
    assert found.disk_bytes is not None
    assert found.disk_bytes >= 2 * 8192


def test_a_process_that_took_over_the_id_counts_for_nobody(
    usage: GuestUsage, tmp_path: Path
) -> None:
    (tmp_path / "proc" / "42" / "cmdline").write_bytes(b"/bin/sh\0")
    assert usage.of(UID)[:2] == (None, None)


@pytest.mark.parametrize("text", ["", "x", "-1", "99999999999999999999"])
def test_a_damaged_file_means_unknown(usage: GuestUsage, tmp_path: Path, text: str) -> None:
    (tmp_path / "libvirt" / f"vb-{UID}.pid").write_text(text)
    assert usage.of(UID)[:2] == (None, None)
    other = UID.replace("1", "2")
    assert usage.of(other) == Usage(None, None, None)


async def test_statistics_list_running_pods(tmp_path: Path, fleet: Fleet, kubelet: Kubelet) -> None:
    sandbox_id, container_id = await kubelet.running()
    other = {"name": "db", "uid": "77", "namespace": "default"}
    await kubelet.container(await kubelet.sandbox(metadata=other))
    uid = next(view.uid for view in fleet.vms.values() if view.powered)
    disk = tmp_path / "state" / "disks" / uid / "root.qcow2"
    disk.parent.mkdir(parents=True)
    disk.write_bytes(b"x" * 8192)
    (stats,) = (await kubelet.call("ListContainerStats")).stats
    assert (stats.attributes.id, stats.attributes.metadata.name) == (container_id, "vm")
    assert stats.writable_layer.used_bytes.value >= 8192
    assert not stats.HasField("cpu"), "there is no emulator in this test"
    answer = await kubelet.call("ContainerStats", container_id=container_id)
    assert answer.stats.attributes.id == container_id
    pods = (await kubelet.call("ListPodSandboxStats")).stats
    assert len(pods) == 2
    pod = (await kubelet.call("PodSandboxStats", pod_sandbox_id=sandbox_id)).stats
    assert [one.attributes.id for one in pod.linux.containers] == [container_id]
    wanted = {"label_selector": {"io.kubernetes.container.name": "x"}}
    assert not (await kubelet.call("ListContainerStats", filter=wanted)).stats


async def test_metrics_have_only_what_is_known_and_only_described_names(
    tmp_path: Path, fleet: Fleet, kubelet: Kubelet
) -> None:
    sandbox_id, container_id = await kubelet.running()
    disk = tmp_path / "state" / "disks" / fleet.vm.uid / "root.qcow2"
    disk.parent.mkdir(parents=True)
    disk.write_bytes(b"x" * 8192)
    described = (await kubelet.call("ListMetricDescriptors")).descriptors
    keys = {one.name: list(one.label_keys) for one in described}
    (pod,) = (await kubelet.call("ListPodSandboxMetrics")).pod_metrics
    (container,) = pod.container_metrics
    assert (pod.pod_sandbox_id, container.container_id) == (sandbox_id, container_id)
    (metric,) = container.metrics  # there is no emulator in this test
    assert (metric.name, metric.metric_type) == ("container_fs_usage_bytes", api_pb2.GAUGE)
    assert dict(zip(keys[metric.name], metric.label_values, strict=True)) == {
        "id": container_id,
        "name": "vm",
        "device": "disks",
    }
    assert metric.value.value >= 8192
    assert metric.timestamp > 0


def test_metrics_are_the_statistics_in_their_units() -> None:
    usage = {"value": 5 * 10**6}
    container = {
        "attributes": {"id": "c", "metadata": {"name": "vm"}},
        "cpu": {"timestamp": 7, "usage_core_nano_seconds": {"value": 2_900_000_000}},
        "memory": {"timestamp": 8, "usage_bytes": usage, "working_set_bytes": usage},
    }
    about = {"id": "s", "metadata": {"name": "web"}}
    told = of_sandbox({"attributes": about, "linux": {"containers": [container]}}, [], now_ns=9)
    (inside,) = told["container_metrics"]
    assert {one["name"]: one["value"]["value"] for one in inside["metrics"]} == {
        "container_cpu_usage_seconds_total": 2,
        "container_memory_usage_bytes": 5 * 10**6,
        "container_memory_working_set_bytes": 5 * 10**6,
    }
    assert {one["timestamp"] for one in inside["metrics"]} == {8}
    assert len({one.name for one in METRICS}) == len(METRICS)


@pytest.fixture
def links(tmp_path: Path) -> Path:
    """A host on which a VM has a veth pair of netd, and a link of a CNI plugin."""
    folder = tmp_path / "net"
    for name, alias in ((host_link(UID, 0), UID), ("veth7", ""), (host_link(UID, 2), "another")):
        (folder / name / "statistics").mkdir(parents=True)
        (folder / name / "ifalias").write_text(f"{alias}\n")
        for at, counter in enumerate(COUNTERS):
            (folder / name / "statistics" / counter).write_text(f"{100 + at}\n")
    return folder


COUNTERS = [f"{side}_{kind}" for side in ("rx", "tx") for kind in KINDS]
RESULT = {"interfaces": [{"name": "cni0"}, {"name": "veth7"}, {"name": "eth1", "sandbox": "/x"}]}


@pytest.fixture
def traffic(tmp_path: Path, links: Path) -> GuestTraffic:
    """The counters on that host."""
    (tmp_path / f"blue-{UID}-eth1").write_text(json.dumps({"result": RESULT}))
    return GuestTraffic(tmp_path, links)


def test_what_the_host_sends_is_what_the_guest_receives(traffic: GuestTraffic) -> None:
    first, second = traffic.of(UID)
    assert (first.name, second.name) == ("eth0", "eth1")
    assert first.counters == second.counters
    assert first.counters["receive_bytes"] == 104
    assert first.counters["transmit_bytes"] == 100
    told = with_network({"linux": {}}, (first, second), now_ns=9)["linux"]["network"]
    assert told["default_interface"]["rx_bytes"] == {"value": 104}
    assert [one["name"] for one in told["interfaces"]] == ["eth1"]
    assert traffic.of(UID.replace("1", "2")) == ()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"result": {"interfaces": [{"name": "../veth7"}]}}', "{}"]
)
def test_a_result_that_names_no_link_has_no_counters(
    traffic: GuestTraffic, tmp_path: Path, text: str
) -> None:
    (tmp_path / f"blue-{UID}-eth1").write_text(text)
    assert [one.name for one in traffic.of(UID)] == ["eth0"]


def test_the_metrics_of_a_pod_have_the_names_and_labels_of_containerd(
    traffic: GuestTraffic,
) -> None:
    about = {"id": "s", "metadata": {"name": "web"}}
    stats = {"attributes": about, "linux": {"containers": []}}
    told = of_sandbox(stats, traffic.of(UID), now_ns=9)["metrics"]
    keys = {one["name"]: one["label_keys"] for one in descriptors()}
    assert len(told) == 2 * 8
    received = next(one for one in told if one["name"] == "container_network_receive_bytes_total")
    assert dict(zip(keys[received["name"]], received["label_values"], strict=True)) == {
        "id": "s",
        "name": "web",
        "interface": "eth0",
    }
    assert (received["value"]["value"], received["metric_type"]) == (104, "COUNTER")
    assert {one["name"] for one in told} <= set(keys)


async def test_statistics_of_nobody_are_not_found(kubelet: Kubelet) -> None:
    code, _ = await kubelet.refused("ContainerStats", container_id="nobody")
    assert code is StatusCode.NOT_FOUND
    code, _ = await kubelet.refused("PodSandboxStats", pod_sandbox_id="nobody")
    assert code is StatusCode.NOT_FOUND
