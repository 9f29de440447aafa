"""Losses of programs, of the bus and of the whole node under pods that are VMs and containers."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.chaos.test_lost_host import reboot
from tests.e2e import host
from tests.e2e.platform import Platform, until
from tests.e2e.test_vm_pod import bus_away
from tests.kubernetes.pod_node import BOOT_S, PodNode, box, guest

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(2400),
]

PIECES = ("nats-server", "controller", "imaged", "netd", "nodeagent")


@pytest.fixture
def own(pod_node: PodNode, request: pytest.FixtureRequest) -> Iterator[PodNode]:
    """A namespace of the test's own, with the running pods `guest`, a VM, and `box`."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name[5:45]).strip("-")
    with pod_node.apart(name) as own:
        own.apply(guest("guest"), box("box"))
        own.wait("condition=Ready", "pod/guest", "pod/box")
        own.booted("guest")
        yield own


def test_pods_survive_the_kill_of_each_part_of_virtbus(own: PodNode) -> None:
    platform, node = own.platform, own.host
    before, containers = own.pods(), node.containers()
    (vm,) = own.vms()
    emulators = host.qemu_pids(vm["uid"])
    for piece in (*PIECES, "all of them"):
        if piece in PIECES:
            platform.wait_back(piece, platform.kill(piece))
        else:
            _kill_virtbus(platform)
        until(node.answers, "both runtimes answer again")
        assert node.containers() == containers, piece
        until(own.ready, f"the Node is Ready after the kill of {piece}")
    assert own.pods() == before
    assert host.qemu_pids(vm["uid"]) == emulators
    assert own.kubectl("exec", "guest", "--", "echo", "here") == "here\n"


def _kill_virtbus(platform: Platform) -> None:
    """Kill `virtbus up`, whose services end with it, and start it again."""
    services = platform.pids().values()
    platform.kill("up")
    platform.up.wait(30)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in services), "they end with it")
    platform.start()
    platform.wait_whole()


@pytest.mark.parametrize("away_s", [100, 900])
def test_a_bus_that_is_away_is_no_node_that_is_away(own: PodNode, away_s: int) -> None:
    """kubelet restarts in the middle. A pod is removed and another one is made meanwhile."""
    own.apply(guest("leaves"))
    own.wait("condition=Ready", "pod/leaves")
    own.booted("leaves")
    uids = {one["labels"]["io.kubernetes.pod.name"]: one["uid"] for one in own.vms()}
    stays = {name: told for name, told in own.pods().items() if name != "leaves"}
    containers = {key: one for key, one in own.host.containers().items() if one[0] in stays}
    with bus_away(own.platform):
        began = time.monotonic()
        until(lambda: not _bus(own), "the runtime has noticed", within_s=30)
        own.apply(guest("late"))
        with _watched(own, stays, containers, began + away_s / 2):
            assert own.delete("leaves") < 60
            own.host.cri.kill()
            own.host.cri.start()
        own.restart_kubelet()
        with _watched(own, stays, containers, began + away_s):
            until(lambda: "the bus is away" in own.events("late"), "the reason", within_s=60)
            assert own.kubectl("exec", "guest", "--", "echo", "here") == "here\n"
            assert "GUEST-READY" in own.kubectl("logs", "guest")
    own.wait("condition=Ready", "pod/late")
    assert {name: own.pods()[name] for name in stays} == stays
    until(lambda: uids["leaves"] not in {one["uid"] for one in own.vms()}, "its VM is gone, too")
    assert uids["guest"] in {one["uid"] for one in own.vms()}


def _bus(own: PodNode) -> bool:
    conditions = own.host.call("Status").status.conditions
    return any(one.type == "virtbus.io/BusConnected" and one.status for one in conditions)


@contextmanager
def _watched(
    own: PodNode,
    stays: dict[str, tuple[str, int, bool]],
    containers: dict[str, tuple[str, int]],
    until_s: float,
) -> Iterator[None]:
    """Look, from the end of the context until a time: the Node is Ready, and each pod stays."""
    yield
    while time.monotonic() < until_s:
        assert own.ready(), own.cluster.kubectl("describe", "node")
        assert stays.items() <= own.pods().items()
        assert containers.items() <= own.host.containers().items()
        time.sleep(2)


def test_after_a_reboot_of_the_node_its_pods_come_back(own: PodNode) -> None:
    (vm,) = own.vms()
    own.kubectl("exec", "guest", "--", "sh", "-c", "echo kept >/root/kept; sync")
    pods = own.pods()
    kubelet = own.host.kubelet.pid
    os.kill(kubelet, signal.SIGSTOP)  # it sees no program of the node end
    own.host.power_off()
    reboot(own.platform, own.platform.vms())
    own.platform.start()
    own.platform.wait_whole()
    own.host.power_on()

    def back() -> bool:
        now = own.pods()
        return all(now[name][0] == uid and now[name][2] for name, (uid, _, _) in pods.items())

    until(lambda: own.pods()["guest"][1] == 1, "the guest's next attempt", within_s=BOOT_S)
    until(back, lambda: f"the same pods are ready: {own.pods()}", within_s=BOOT_S)
    own.booted("guest")
    assert own.container("guest")["lastState"]["terminated"]["reason"] == "EmulatorDied"
    assert [one["uid"] for one in own.vms()] == [vm["uid"]]
    assert own.kubectl("exec", "guest", "--", "cat", "/root/kept") == "kept\n"
    assert own.ready()
