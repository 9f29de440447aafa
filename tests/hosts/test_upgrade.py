"""Each service at an older commit next to the newer ones, and back, with running guests (F38).

`make upgrade-test FROM=<commit>` runs VMS guests, or as many as the host can hold. In `make
test` the older commit is the newer one: the restarts are the same, and no other environment is
built.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.platform import Json, until
from tests.hosts.fleet import STATE
from tests.hosts.older import python_of
from tests.hosts.one_host import SERVICES, OneHost, one_host

from virtbus.controller.core.placement import CPU_OVERCOMMIT

FROM = os.environ.get("FROM", "")
ROOM = int((os.cpu_count() or 1) * CPU_OVERCOMMIT) - 1
"""Return the VMs that fit, besides the one that is created and deleted across a restart."""
VMS = min(int(os.environ.get("VMS", "2")), ROOM)
NEWER = Path(sys.executable)
KEPT = ("uid", "state", "node", "epoch", "generation", "restarts", "interfaces")

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600 + 30 * VMS)]


@pytest.fixture(scope="module")
def older() -> Path:
    return python_of(FROM) if FROM else NEWER


@pytest.fixture(scope="module")
def platform(older: Path) -> Iterator[OneHost]:
    with one_host(older) as made:
        yield made


def shown(platform: OneHost) -> dict[str, Json]:
    """Return the API's view of each VM, without fields that may change."""
    return {vm["name"]: {field: vm.get(field) for field in KEPT} for vm in platform.vms()}


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def test_each_service_is_upgraded_and_rolled_back_under_running_guests(
    platform: OneHost, older: Path
) -> None:
    for number in range(VMS):
        platform.create(f"vm-{number}")
    guests, views = platform.host.emulators(), shown(platform)
    assert len(guests) == VMS
    assert {view["state"] for view in views.values()} == {"Running"}
    say(f"\n{VMS} guests run at {FROM or 'the same commit'}")
    for version, python in (("newer", NEWER), ("older", older))[: 2 if FROM else 1]:
        for service in SERVICES:
            before = platform.create("across")["uid"]
            platform.change(service, python)
            assert platform.host.emulators().keys() >= guests.keys(), f"{service} {version}"
            platform.cli("vm", "delete", "across", "--grace", "0")
            assert before not in platform.host.emulators().values()
            assert shown(platform) == views, f"{service} {version}"
            assert platform.host.emulators() == guests, f"{service} {version}"
            say(f"{service} is {version}: {len(guests)} guests run on, none restarted")
    platform.nothing_left()


def test_state_of_a_newer_program_is_refused_with_the_next_step(platform: OneHost) -> None:
    """The guests continue meanwhile, and the right program adopts them."""
    platform.create("stays")
    guests = platform.host.emulators()
    version = platform.host.box.path(STATE / "VERSION")
    was = version.read_text()
    platform.stop_service("nodeagent")
    version.write_text("99\n")
    platform.run_service("nodeagent")
    until(
        lambda: "install the newer virtbus" in platform.service_log("nodeagent"),
        lambda: platform.service_log("nodeagent")[-2000:],
    )
    assert platform.host.emulators() == guests
    version.write_text(was)
    platform.wait_whole()
    assert platform.host.emulators() == guests
    platform.nothing_left()
