"""Properties of interfaces, as a booted guest sees them, and as they change while it runs."""

import errno
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.login import Login
from tests.e2e.platform import HALT, Json, Platform, until

from virtbus.schemas.nic import NICS_MAX

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]

NICS: list[dict[str, Any]] = [
    {"name": "default", "queues": 2, "mtu": 1400, "acpi_index": 7},
    {"name": "more", "state": "down"},
]


def change(platform: Platform, name: str, **changes: Any) -> Json:
    """Change the second interface of a running VM by `vm.update`."""
    view = platform.get(name)
    view["spec"]["domain"]["devices"]["interfaces"][1] |= changes
    request = {"uid": view["uid"], "revision": view["revision"], "spec": view["spec"]}
    platform.ask("vm.update", request)
    return platform.get(name)


def test_a_guest_sees_its_interfaces_properties_and_the_changes_of_its_link(
    platform: Platform, tmp_path: Path
) -> None:
    login = Login(tmp_path)
    spec = {
        "domain": {"devices": {"interfaces": NICS}},
        "networks": [{"name": nic["name"]} for nic in NICS],
    }
    file = tmp_path / "vm.json"
    file.write_text(json.dumps({"image": "tiny", "memory": "128MiB", "cpus": 2, "spec": spec}))
    view = platform.create("nics", "-f", str(file), "--ssh-key", login.public_key, wait="ready")
    assert [one["state"] for one in view["interfaces"]] == ["up", "down"]
    assert [one["mtu"] for one in view["interfaces"]] == [1400, 1500]

    def in_guest(command: str) -> str:
        return login(view, command).strip()

    assert in_guest("cat /sys/class/net/eth0/mtu") == "1400"
    assert in_guest("ls -d /sys/class/net/eth0/queues/rx-* | wc -l") == "2"
    assert in_guest("cat /sys/class/net/eth0/device/../acpi_index") == "7"
    in_guest("ip link set eth1 up")
    assert in_guest("cat /sys/class/net/eth1/carrier") == "0"

    limits = {"inbound": {"bytes_per_s": "1MiB"}, "outbound": {"bytes_per_s": "2MiB"}}
    change(platform, "nics", state="up", limits=limits)
    until(lambda: in_guest("cat /sys/class/net/eth1/carrier") == "1", "the link is up")
    after = until(
        lambda: (now := platform.get("nics"))["interfaces"][1]["state"] == "up" and now,
        "the status shows the link",
    )
    assert "RestartRequired" not in [one["type"] for one in after["conditions"]]
    change(platform, "nics", state="down")
    until(lambda: in_guest("cat /sys/class/net/eth1/carrier") == "0", "the link is down")
    (first, _) = json.loads(platform.cli("vm", "get", "nics", "--counters", "-o", "json"))[
        "counters"
    ]
    assert first["from_guest"]["packets"] > 10
    platform.delete("nics")


def greeting(address: str, port: int) -> bytes:
    """Return the first bytes from a port; none while a guest that is ready starts its sshd."""
    try:
        with socket.create_connection((address, port), 10) as connection:
            return connection.recv(4)
    except (ConnectionRefusedError, TimeoutError):
        return b""
    except OSError as error:  # while the network of a restarted guest is made
        if error.errno != errno.EHOSTUNREACH:
            raise
        return b""


def test_a_published_port_reaches_the_guest_at_an_address_of_its_host(
    platform: Platform, tmp_path: Path
) -> None:
    login = Login(tmp_path)
    wanted = ("--ssh-key", login.public_key, "--publish", "2222:22")
    view = platform.create("published", *wanted, wait="ready")
    assert view["interfaces"][0]["published"] == ["0.0.0.0:2222->22/tcp"]
    until(lambda: greeting("10.127.0.1", 2222) == b"SSH-", "the guest's sshd answers")
    assert "0.0.0.0:2222->22/tcp" in platform.cli("vm", "get", "published")
    platform.create("late", "--publish", "2222:22", wait="")
    late = until(
        lambda: (now := platform.get("late"))["reason"] == "port_taken" and now, "the refusal"
    )
    assert f"belongs to the VM default/published ({view['uid']})" in late["message"]
    platform.delete("published")
    platform.wait_state("late", "Running")
    platform.delete("late")


def test_a_guest_behind_nat_has_its_own_address_and_only_declared_ports(
    platform: Platform, tmp_path: Path
) -> None:
    login = Login(tmp_path)
    nic = {"name": "default", "binding": "masquerade", "ports": [{"port": 22}]}
    spec = {"domain": {"devices": {"interfaces": [nic]}}, "networks": [{"name": "default"}]}
    file = tmp_path / "vm.json"
    file.write_text(json.dumps({"image": "tiny", "memory": "128MiB", "spec": spec}))
    view = platform.create("behind", "-f", str(file), "--ssh-key", login.public_key, wait="ready")
    (shown,) = view["interfaces"]
    assert (shown["binding"], shown["guest_addresses"]) == ("masquerade", ["10.0.2.2/24"])
    address = shown["addresses"][0].partition("/")[0]
    assert address.startswith("10.127.")
    assert "10.0.2.2/24" in login(view, "ip -4 -o addr show dev eth0")
    assert "default via 10.0.2.1" in login(view, "ip route")
    assert "1 packets received" in login(view, "ping -c 1 -W 5 10.127.0.1")
    # the guest listens at both ports, and one of them is declared
    login(view, "(nc -l -p 8080 </dev/null >/dev/null 2>&1 &)")
    with pytest.raises(TimeoutError):
        socket.create_connection((address, 8080), 2).close()
    assert greeting(address, 22) == b"SSH-"
    counted = json.loads(platform.cli("vm", "get", "behind", "--counters", "-o", "json"))
    assert counted["counters"][0]["refused"]["port"] > 0
    told = platform.cli("vm", "net", "behind", "--check")
    assert "only these ports lead to the guest: 22/tcp" in told
    assert "each part is as it should be" in told
    platform.cli("vm", "restart", "behind")
    again = platform.wait_state("behind", "Running")
    until(lambda: greeting(address, 22) == b"SSH-", "the restarted guest answers")
    assert again["interfaces"][0]["addresses"] == shown["addresses"]
    platform.delete("behind")


@pytest.mark.long
def test_a_guest_sees_32_interfaces(platform: Platform, tmp_path: Path) -> None:
    login = Login(tmp_path)
    nics = [{"name": f"n{n}"} for n in range(NICS_MAX)]
    spec = {"domain": {"devices": {"interfaces": nics}}, "networks": nics}
    file = tmp_path / "vm.json"
    file.write_text(json.dumps({"image": "tiny", "memory": "192MiB", "spec": spec}))
    view = platform.create("many", "-f", str(file), "--ssh-key", login.public_key, wait="ready")
    address = view["interfaces"][0]["addresses"][0].partition("/")[0]
    # the guest asks for an address on each interface before it starts its sshd
    until(lambda: greeting(address, 22) == b"SSH-", "the guest's sshd answers", within_s=120)
    assert login(view, "ls -d /sys/class/net/eth* | wc -l").strip() == str(NICS_MAX)
    macs = login(view, "cat /sys/class/net/eth*/address").split()
    assert sorted(macs) == sorted(nic["mac"] for nic in view["interfaces"])
    platform.delete("many")


@pytest.mark.long
def test_the_firmware_asks_for_an_address_on_each_interface_of_the_boot_order(
    platform: Platform, tmp_path: Path
) -> None:
    nics = [
        {"name": f"on-{model}", "model": model, "boot_order": order}
        for order, model in enumerate(("virtio", "e1000", "e1000e"), start=1)
    ]
    networks = [{"name": nic["name"]} for nic in nics]
    spec = {"domain": {"devices": {"interfaces": nics}}, "networks": networks}
    file = tmp_path / "vm.json"
    file.write_text(json.dumps({"image": HALT, "memory": "64MiB", "spec": spec}))
    platform.create("netboot", "-f", str(file))

    def answered() -> bool:
        text = platform.cli("vm", "get", "netboot", "--counters", "-o", "json")
        found = json.loads(text)["counters"]
        return all(one[way]["packets"] >= 2 for one in found for way in ("from_guest", "to_guest"))

    until(answered, "an offer and a lease on each", within_s=120)
    platform.delete("netboot")
