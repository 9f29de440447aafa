"""IPv6 of booted guests: addresses by DHCPv6, reach by address and by name, claimed addresses."""

import json
from collections.abc import Iterator
from ipaddress import ip_interface
from pathlib import Path

import pytest
from tests.e2e import host
from tests.e2e.login import Login
from tests.e2e.platform import Json, Platform, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]

SUBNET6 = "fd00:127::1/64"
NETWORKS = {"networks": [{"name": "front"}, {"name": "back", "network": "db"}]}


@pytest.fixture
def six() -> Iterator[Platform]:
    """A platform whose built-in network has IPv6."""
    made = Platform({"VIRTBUS_SUBNET6": SUBNET6})
    try:
        made.start()
        made.quiet = made.census()
        yield made
    finally:
        made.wipe()


def of(view: Json, nic: int, version: int) -> str:
    """Return the address of an interface, without the prefix."""
    found = (ip_interface(text) for text in view["interfaces"][nic]["addresses"])
    return str(next(one.ip for one in found if one.version == version))


def test_guests_use_ipv6_and_keep_claimed_addresses(six: Platform, tmp_path: Path) -> None:
    login = Login(tmp_path)
    pool = ("--subnet", "10.9.0.0/24", "--subnet6", "fd00:9::/64", "--pool", "fleet")
    six.cli("network", "create", "db", "--kind", "isolated", *pool)
    file = tmp_path / "vm.json"
    file.write_text(json.dumps({"image": "tiny", "memory": "128MiB", "spec": NETWORKS}))
    for name in ("one", "two"):
        six.create(name, "-f", str(file), "--ssh-key", login.public_key, wait="")
    one, two = six.wait_ready("one", "two")

    def in_guest(command: str, view: Json = one) -> str:
        return login(view, command).strip()

    def has_address(view: Json, nic: int) -> None:
        has, device = of(view, nic, 6), f"ip -6 addr show eth{nic} scope global"

        def usable() -> bool:
            shown = in_guest(device, view)  # a new address is tentative for a second
            return f"{has}/128" in shown and "tentative" not in shown

        until(usable, f"{has} by DHCPv6")

    for view in (one, two):
        for nic in (0, 1):
            has_address(view, nic)
    in_guest(f"ping6 -c 1 -W 5 {ip_interface(SUBNET6).ip}")
    in_guest(f"ping6 -c 1 -W 5 {of(two, 0, 6)}")
    in_guest(f"ping6 -c 1 -W 5 -I eth1 {of(two, 1, 6)}")
    assert of(two, 0, 6) in in_guest("nslookup -type=AAAA two.default.vm.internal")
    in_guest("ping6 -c 1 -W 5 two")
    host.run("ping", "-6", "-c", "1", "-W", "5", of(one, 0, 6))
    assert in_guest("ping6 -c 1 -W 1 -I eth1 fd00:9::1 >/dev/null 2>&1 || echo closed") == "closed"

    assert json.loads(six.cli("network", "get", "db", "-o", "json"))["given"] == 4
    six.wait_back("netd", six.kill("netd"))
    in_guest(f"ping6 -c 1 -W 5 {of(two, 0, 6)}")
    six.cli("vm", "stop", "two")
    six.cli("vm", "start", "two")
    (again,) = six.wait_ready("two")
    assert again["interfaces"][1]["addresses"] == two["interfaces"][1]["addresses"]
    six.delete("one", "two")

    def given() -> int:
        count: int = json.loads(six.cli("network", "get", "db", "-o", "json")).get("given", 0)
        return count

    until(lambda: not given(), "the addresses are free")
    six.cli("network", "delete", "db")
    six.nothing_left()
