"""A broken host: each cause is named, services stay up, and after the repair VMs run."""

import re

import pytest
from tests.e2e import host
from tests.e2e.platform import Platform, Refused, Stage, tiny_image, until

from virtbus.schemas.api import NodePage
from virtbus.schemas.node import NodeState

pytestmark = pytest.mark.e2e

NO_FLOOR = {"VIRTBUS_MIN_FREE_BYTES": "0", "VIRTBUS_MIN_FREE_RATIO": "0"}


def _small_store(platform: Platform) -> None:
    """An image store on a file system that holds the source, but not a copy next to it."""
    images = platform.state_dir / "images"
    images.mkdir(parents=True)
    size_bytes = tiny_image().stat().st_size * 4 // 3
    host.run("mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=711", "e2e", str(images))
    platform.at_end.callback(host.run, "umount", "-l", str(images))


def test_a_full_disk_fails_the_vm_with_its_cause_and_free_space_repairs_it(stage: Stage) -> None:
    with stage.apart(NO_FLOOR, _small_store) as platform:
        pids = platform.pids()
        with pytest.raises(Refused) as refused:
            platform.create("full", "--timeout", "60")
        assert refused.value.error["reason"] == "disk_full", refused.value.text
        assert "free" in refused.value.text
        platform.delete("full")
        platform.wait_quiet()
        images = platform.state_dir / "images"
        host.run("mount", "-o", "remount,size=200m", str(images))
        platform.create("fits")
        assert platform.pids() == pids
        platform.nothing_left()


def test_node_with_too_little_free_disk_is_given_no_vm(stage: Stage) -> None:
    with stage.apart({"VIRTBUS_MIN_FREE_RATIO": "0.99"}) as platform:
        shown = platform.ask("vm.create", {"name": "low", "image": "tiny"})["vm"]
        assert (shown["state"], shown["node"]) == ("Pending", "_")
        assert "of disk free" in shown["message"]
        platform.delete("low")
        assert platform.vms() == []
        platform.nothing_left()


def test_libvirt_that_cannot_be_reached_is_named_and_nothing_is_accepted(stage: Stage) -> None:
    nowhere = {"VIRTBUS_LIBVIRT_URI": "qemu:///system?socket=/nonexistent/libvirt-sock"}
    with stage.apart(nowhere, whole=False) as platform:

        def nodes() -> NodePage:
            return NodePage.model_validate(platform.ask("node.list", timeout_s=10))

        until(
            lambda: any("libvirt" in s.message for n in nodes().items for s in n.services.values()),
            "the node says that libvirt is away",
        )
        assert [node.state for node in nodes().items] == [NodeState.RECOVERING]
        status = platform.try_cli("status")
        assert status.returncode == 5
        assert re.search("alarm: agent on e2e .*libvirt", status.stdout), status.stdout
        pids = platform.pids()
        shown = platform.ask("vm.create", {"name": "none", "image": "tiny"})["vm"]
        assert (shown["state"], shown["node"]) == ("Pending", "_")
        assert "libvirt" in shown["message"]
        platform.delete("none")
        assert platform.vms() == []
        assert platform.pids() == pids


def test_second_up_on_the_same_directories_is_refused(platform: Platform) -> None:
    done = platform.try_cli("up", timeout_s=60)
    assert done.returncode == 1
    assert str(platform.up.pid) in done.stderr
    assert "--data" in done.stderr


def test_commands_without_a_bus_say_how_to_start_one(stage: Stage) -> None:
    stage.end()
    platform = Platform()
    try:
        done = platform.try_cli("vm", "list", timeout_s=60)
    finally:
        platform.wipe()
    assert done.returncode == 5
    assert "virtbus up" in done.stderr
