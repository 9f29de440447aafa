"""A VM created over the bus really boots."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.e2e import host
from tests.e2e.platform import Json, Platform, address, is_ready, until

pytestmark = pytest.mark.e2e


def test_create_and_wait_ready_gives_a_guest_that_answers(platform: Platform) -> None:
    view = platform.create("a", wait="ready")
    assert view["state"] == "Running"
    assert is_ready(view)
    assert view["image_digest"].startswith("sha256:")
    assert host.ping(address(view))
    log = until(lambda: _with(platform.console_log("a"), "GUEST-READY"), "the ready line")
    assert f"GUEST-READY hostname=a ip={address(view)}" in log
    assert len(host.qemu_pids(view["uid"])) == 1


def _with(text: str, word: str) -> str:
    return text if word in text else ""


def test_delete_restores_the_census_and_the_guest_answers_until_its_halt(
    platform: Platform,
) -> None:
    view = platform.create("a", wait="ready")
    assert host.ping(address(view))
    pinging = subprocess.Popen(
        ["ping", "-n", "-i", "0.2", "-O", address(view)], stdout=subprocess.PIPE, text=True
    )
    try:
        platform.delete("a", grace_s=None)
    finally:
        pinging.terminate()
        output, _ = pinging.communicate(timeout=10)
    answered = [line for line in output.splitlines() if "bytes from" in line]
    # a shutdown by ACPI takes more than two seconds, and the guest answers nearly all the time
    assert len(answered) >= 4, output
    assert not host.ping(address(view), wait_s=1)
    platform.wait_quiet(within_s=10)


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


def test_three_at_once_are_each_reachable_under_addresses_of_their_own(platform: Platform) -> None:
    with ThreadPoolExecutor(3) as pool:
        views: list[Json] = list(
            pool.map(lambda name: platform.create(name, wait="ready"), ("one", "two", "three"))
        )
    addresses = {address(view) for view in views}
    assert len(addresses) == 3
    assert len({view["interfaces"][0]["mac"] for view in views}) == 3
    assert all(host.ping(one) for one in addresses)
    platform.delete("one", "two", "three")


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
