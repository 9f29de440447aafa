"""A host whose hypervisor is partly killed or hangs, with real guests (F6, F9)."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.platform import Json, until
from tests.hosts.one_host import OneHost, one_host

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(400)]

BACK_S = 15.0
"""F6: the limit from libvirtd's return until past and current changes are handled."""

UNKNOWN_S = 6.0
"""Limit until a list shows Unknown: two seconds of patience, and the way to the list."""


@pytest.fixture(scope="module")
def platform() -> Iterator[OneHost]:
    with one_host(Path(sys.executable)) as made:
        yield made


def view(platform: OneHost, name: str) -> Json:
    (found,) = [vm for vm in platform.vms() if vm["name"] == name]
    return found


def pid_of(platform: OneHost, uid: str) -> int:
    found: int = until(
        lambda: next((pid for pid, of in platform.host.emulators().items() if of == uid), 0),
        f"an emulator of {uid}",
    )
    return found


def runs_again(platform: OneHost, name: str) -> bool:
    """Return True once it was started again, exactly once."""
    shown = view(platform, name)
    return shown.get("restarts") == 1 and shown["state"] == "Running"


def test_guests_survive_libvirtd_and_the_agent_subscribes_and_lists_again(
    platform: OneHost,
) -> None:
    uids = [platform.create(name)["uid"] for name in ("stays", "dies-then", "dies-after")]
    guests, agent = platform.host.emulators(), platform.host.pids()["nodeagent"]
    platform.host.box.kill(platform.host.pids()["libvirtd"])
    platform.host.box.kill(pid_of(platform, uids[1]))  # no service is there to report it
    until(platform.host.libvirt_answers, "libvirtd is back")
    until(
        lambda: runs_again(platform, "dies-then"), "what died meanwhile is listed", within_s=BACK_S
    )
    platform.host.box.kill(pid_of(platform, uids[2]))
    until(lambda: runs_again(platform, "dies-after"), "its event is heard", within_s=BACK_S)
    now = platform.host.emulators()
    stayed = pid_of(platform, uids[0])
    assert guests[stayed] == now[stayed] == uids[0]
    assert sorted(now.values()) == sorted(uids), "one emulator a VM"
    assert view(platform, "stays").get("restarts", 0) == 0
    assert platform.host.pids()["nodeagent"] == agent
    platform.create("new")
    platform.nothing_left()


def test_a_guest_that_died_with_libvirtd_is_unknown_and_then_shown_as_ended(
    platform: OneHost,
) -> None:
    """As in a restart of compose's container `libvirt`: the list showed Running meanwhile."""
    uid = platform.create("gone")["uid"]
    box, pid = platform.host.box, pid_of(platform, uid)
    box.unkeep("libvirtd")
    box.kill(platform.host.pids()["libvirtd"])
    box.kill(pid)
    until(
        lambda: view(platform, "gone")["state"] == "Unknown",
        "nobody says that it runs",
        within_s=UNKNOWN_S,
    )
    assert view(platform, "gone")["reason"] == "node_recovering"
    box.keep("libvirtd", "tini", "-s", "--", "libvirtd")
    until(platform.host.libvirt_answers, "libvirtd is back")
    until(lambda: runs_again(platform, "gone"), "it is started again", within_s=BACK_S)
    assert pid_of(platform, uid) != pid
    platform.nothing_left()


def test_a_hung_emulator_delays_nobody_and_is_ended_by_force(platform: OneHost) -> None:
    hung = platform.create("hung")["uid"]
    platform.create("well")
    platform.host.box.kill(pid_of(platform, hung), signal.SIGSTOP)
    platform.cli("vm", "stop", "hung", "--no-wait")
    platform.create("beside")
    platform.cli("vm", "delete", "well", "--grace", "0")
    assert hung in platform.host.emulators().values(), "nobody waited for its end"
    platform.cli("vm", "delete", "hung", "--grace", "0")
    assert hung not in platform.host.emulators().values()
    platform.nothing_left()
