"""A VM created over the bus really boots."""

import json
from pathlib import Path

import pytest
from tests.e2e import host
from tests.e2e.platform import Json, Platform, address, until

pytestmark = pytest.mark.e2e


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ten_in_sequence_are_each_reachable(platform: Platform) -> None:
    for number in range(10):
        name = f"seq-{number}"
        view = platform.create(name, wait="running")
        assert host.ping(address(view), wait_s=60), name
        platform.delete(name)
        assert platform.vms() == []
        platform.wait_quiet()


def test_the_events_of_a_create_are_in_order(platform: Platform) -> None:
    view = platform.create("a")
    platform.delete("a")
    kinds = platform.events(view["uid"])
    for earlier, later in (
        ("vm.accepted", "image.ready"),
        ("vm.accepted", "network.ready"),
        ("vm.scheduled", "domain.defined"),
        ("image.ready", "domain.defined"),
        ("domain.defined", "domain.started"),
        ("domain.started", "vm.deleting"),
        ("vm.deleting", "domain.stopped"),
        ("domain.stopped", "network.released"),
        ("domain.stopped", "disks.released"),
        ("network.released", "vm.deleted"),
        ("disks.released", "vm.deleted"),
    ):
        assert kinds.index(earlier) < kinds.index(later), kinds
    assert len(kinds) == len(set(kinds)), kinds


WORKERS = {"client", "controller", "imaged", "netd", "nodeagent", "vmwrapper"}


def test_one_trace_covers_the_command_and_every_service(platform: Platform) -> None:
    platform.create("a")

    def traces() -> list[Json]:
        found: list[Json] = json.loads(platform.cli("vm", "trace", "a", "-o", "json"))["traces"]
        services = {span["service"] for span in found[0]["spans"]}
        return found if services >= WORKERS else []

    assert len(until(traces, "spans of every service", within_s=15)) == 1


def test_guest_files_are_private_to_qemus_user(platform: Platform) -> None:
    platform.create("a")
    readable = [
        str(path)
        for path in Path(platform.state_dir, "disks").rglob("*")
        if path.is_file() and path.stat().st_mode & 0o007
    ]
    assert readable == []
