"""A volume goes from host to host with its data, also when the controller and services die."""

import json
from collections.abc import Iterator

import pytest
from tests.e2e.platform import Json, until
from tests.hosts.fleet import Fleet, fleet

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


def volume(platform: Fleet) -> Json:
    """Return the volume; empty fields while no controller answers."""
    told = platform.try_cli("volume", "get", "data", "-o", "json")
    found: Json = json.loads(told.stdout) if told.returncode == 0 else {"node": "", "message": "-"}
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
