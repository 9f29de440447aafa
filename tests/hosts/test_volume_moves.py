"""A volume goes from host to host with its data, also when the controller and services die."""

import json
from collections.abc import Iterator

import pytest
from tests.e2e.platform import Json, until
from tests.hosts.fleet import Fleet, fleet

from virtbus.bus.runtime.ids import uuid7

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

WRITE = """#!/bin/sh
echo moved-by-name | dd of=/dev/vdb conv=fsync 2>/dev/null
echo ALL-WRITTEN > /dev/ttyS0
"""
READ = """#!/bin/sh
head -c 13 /dev/vdb > /dev/ttyS0
echo ALL-READ > /dev/ttyS0
"""


@pytest.fixture(scope="module")
def platform() -> Iterator[Fleet]:
    with fleet(hosts=2, servers=1) as made:
        yield made


def volume(platform: Fleet, name: str = "data") -> Json:
    """Return the volume; empty fields while no controller answers."""
    told = platform.try_cli("volume", "get", name, "-o", "json")
    found: Json = json.loads(told.stdout) if told.returncode == 0 else {"node": "", "message": "-"}
    return found


def vm(platform: Fleet) -> Json:
    """Return the only VM."""
    (found,) = platform.vms()
    return found


def use(platform: Fleet, name: str, script: str, word: str, folder: str) -> None:
    """Run a guest with the volume until it says `word`, then delete it."""
    data = platform.base / f"{folder}-user-data"
    data.write_text(script)
    platform.create(name, "--volume", "data", "--user-data", str(data), wait="ready")
    until(lambda: word in platform.cli("vm", "logs", name), word, within_s=90)
    platform.cli("vm", "delete", name, "--wait")


def test_a_volume_moves_there_and_back_through_deaths_of_services(platform: Fleet) -> None:
    platform.cli("volume", "create", "data", "--size", "64MiB", "--node", "n1")
    use(platform, "writer", WRITE, "ALL-WRITTEN", "write")
    assert volume(platform)["node"] == "n1"
    platform.cli("volume", "move", "data", "--node", "n2", "--no-wait")
    for service in ("imaged", "nodeagent"):
        platform.hosts["n2"].kill(service)
        platform.hosts["n1"].kill(service)
    platform.servers["b1"].kill("controller")
    until(lambda: volume(platform)["node"] == "n2", "it is on n2", within_s=120)
    until(lambda: not volume(platform)["message"], "nothing is left on n1", within_s=60)
    here = platform.hosts["n1"].box.path("/var/lib/virtbus/disks")
    assert not list(here.glob("volumes/*")), "the former data is gone"
    until(lambda: not list(here.glob("exports/*")), "the file is gone")
    images = json.loads(platform.cli("image", "list", "-o", "json"))["items"]
    assert not [one for one in images if "volumes/" in str(one.get("names"))]
    use(platform, "reader", READ, "moved-by-name", "read")
    platform.cli("volume", "move", "data", "--node", "n1")
    assert volume(platform)["node"] == "n1"
    until(lambda: not volume(platform)["message"], "nothing is left on n2", within_s=60)
    use(platform, "again", READ, "moved-by-name", "again")
    platform.cli("volume", "delete", "data")
    operations = json.loads(platform.cli("operation", "list", "-o", "json"))["items"]
    assert {one["kind"] for one in operations} == {"fill"}
    platform.cli("operation", "delete", *(one["id"] for one in operations))
    platform.nothing_left()


def test_a_vm_that_is_off_goes_with_its_volumes_through_deaths_of_services(
    platform: Fleet,
) -> None:
    platform.cli("volume", "create", "data", "--size", "64MiB", "--node", "n1")
    use(platform, "writer", WRITE, "ALL-WRITTEN", "first")
    from_tiny = ("--size", "256MiB", "--from-image", "tiny", "--full")
    platform.cli("volume", "create", "root", *from_tiny, "--node", "n1")
    file, names = platform.base / "web.json", ("root", "data")
    disks = [{"name": name, "volume": {"name": name}} for name in names]
    spec = {"domain": {"memory": {"guest": "128MiB"}}, "volumes": disks}
    file.write_text(json.dumps({"spec": spec}), encoding="utf-8")
    uid = uuid7()
    platform.uids.add(uid)
    platform.cli("vm", "create", "web", "--uid", uid, "-f", str(file), "--wait", "ready")
    platform.cli("vm", "stop", "web", "--grace", "0")
    until(lambda: vm(platform)["state"] == "Stopped", "web is off")
    platform.cli("volume", "move", "data", "--node", "n2", "--no-wait")
    told = platform.try_cli("vm", "start", "web", "-o", "json")
    assert told.returncode != 0
    assert "volume_moving" in told.stdout + told.stderr
    for service in ("imaged", "nodeagent"):
        platform.hosts["n2"].kill(service)
        platform.hosts["n1"].kill(service)
    platform.servers["b1"].kill("controller")
    until(lambda: {volume(platform, one)["node"] for one in names} == {"n2"}, "n2", within_s=180)
    until(lambda: not any(volume(platform, one)["message"] for one in names), "n1", within_s=60)
    assert vm(platform)["node"] == "n2"
    here = platform.hosts["n1"].box.path("/var/lib/virtbus")
    assert not list(here.glob("disks/volumes/*")), "the former data is gone"
    assert not list(here.glob("vms/*")), "nothing of the VM is left on n1"
    platform.cli("vm", "start", "web")
    until(lambda: "GUEST-READY" in platform.cli("vm", "logs", "web"), "it boots", within_s=90)
    platform.cli("vm", "delete", "web", "--wait")
    use(platform, "reader", READ, "moved-by-name", "last")
    platform.cli("volume", "delete", *names)
    operations = json.loads(platform.cli("operation", "list", "-o", "json"))["items"]
    platform.cli("operation", "delete", *(one["id"] for one in operations))
    platform.nothing_left()
