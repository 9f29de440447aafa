"""Two hosts: a drain, a power cut, a fence, and the host's return (ADR 0014; F21, F24, F25).

The emulators of both hosts are counted all the time: no VM ever has two (I1).
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.e2e.platform import Json, until
from tests.hosts.fleet import LEAST_MEMORY, Fleet, fleet

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(420)]

MOVED_S = 90.0


@pytest.fixture(scope="module")
def platform() -> Iterator[Fleet]:
    with fleet(hosts=2, servers=1) as made:
        yield made


@contextmanager
def single_runners(platform: Fleet) -> Iterator[None]:
    """Check all emulators repeatedly; fail if one VM had two at once."""
    doubles: list[str] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            running = [uid for host in platform.hosts.values() for uid in host.emulators().values()]
            doubles.extend(uid for uid in running if running.count(uid) > 1)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    assert doubles == []


def create(platform: Fleet, name: str, **spec: str) -> str:
    """Create a VM that runs on n1; return its uid."""
    asked = {"name": name, "image": "tiny", "memory": LEAST_MEMORY, "spec": spec}
    uid = str(platform.ask("vm.create", asked)["vm"]["uid"])
    runs_on(platform, uid, "n1")
    return uid


def vm(platform: Fleet, uid: str) -> Json:
    found: Json = platform.ask("vm.get", {"uid": uid})
    return found


def runs_on(platform: Fleet, uid: str, node: str) -> None:
    """Return once the VM is shown as Running on the node, and its emulator exists."""

    def there() -> bool:
        shown = vm(platform, uid)
        return (shown["node"], shown["state"]) == (node, "Running")

    until(there, lambda: f"{uid} runs on {node}, but {vm(platform, uid)}", within_s=MOVED_S)
    assert uid in platform.hosts[node].emulators().values()


def traces(platform: Fleet, uid: str, node: str) -> list[str]:
    """Return the host's objects of a VM."""
    return [line for line in platform.hosts[node].census() if uid in line]


def outside(platform: Fleet, uid: str) -> list[str]:
    """Return n1's objects of a VM without its quarantine."""
    return [line for line in traces(platform, uid, "n1") if "/quarantine/" not in line]


def test_vms_change_hosts_and_never_run_twice(platform: Fleet) -> None:
    n1 = platform.hosts["n1"]
    platform.cli("node", "cordon", "n2")
    free = create(platform, "free", eviction_strategy="None")
    kept = create(platform, "kept")
    platform.cli("node", "uncordon", "n2")
    with single_runners(platform):
        # A drain moves VMs that may leave, and lists those that stay.
        drained = platform.try_cli("node", "drain", "n1")
        assert drained.returncode == 1, drained.stderr
        assert "default/free is on n2" in drained.stderr
        assert "default/kept: its disks are on this node" in drained.stderr
        runs_on(platform, free, "n2")
        runs_on(platform, kept, "n1")
        assert traces(platform, free, "n1") == []
        platform.cli("node", "uncordon", "n1")
        platform.cli("vm", "move", "free", "--to", "n1")
        runs_on(platform, free, "n1")

        # Silence moves nothing; a confirmed fence does.
        n1.off()
        refused = platform.try_cli("node", "fence", "n1", "--confirm", "its power is cut")
        assert "was heard" in refused.stderr
        until(lambda: _state(platform, "n1") == "down", "n1 down", within_s=60)
        assert (vm(platform, free)["node"], vm(platform, free)["state"]) == ("n1", "Unknown")
        platform.cli("node", "fence", "n1", "--confirm", "its power is cut")
        runs_on(platform, free, "n2")
        assert vm(platform, kept)["reason"] == "node_fenced"

        # Back with its old disk: it starts nothing, and releases moved VMs.
        n1.on()
        until(lambda: _state(platform, "n1") == "ready", "n1 ready", within_s=90)
        until(lambda: not outside(platform, free), "the old copy is in quarantine", within_s=30)
        assert n1.emulators() == {}
        until(
            lambda: platform.try_cli("node", "unfence", "n1").returncode == 0,
            "n1 unfenced",
            within_s=60,
        )
        runs_on(platform, kept, "n1")
        runs_on(platform, free, "n2")
    listed = json.loads(platform.cli("node", "quarantine", "list", "n1", "-o", "json"))
    for entry in listed["entries"]:  # none if the guest had written nothing
        assert (entry["uid"], entry["name"]) == (free, "free")
        platform.cli("node", "quarantine", "purge", "n1", entry["entry"])
    platform.wait_whole()
    platform.nothing_left()


def _state(platform: Fleet, node: str) -> str:
    detail: Json = json.loads(platform.cli("node", "get", node, "-o", "json"))
    return str(detail["node"]["state"])
