"""The platform's inputs to a guest: its seed, its disks, its networks, its console."""

import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.e2e import host
from tests.e2e.frames import Crafter, spoofed
from tests.e2e.login import Login
from tests.e2e.platform import Json, Platform, address, until

pytestmark = pytest.mark.e2e


@pytest.fixture
def login(tmp_path: Path) -> Login:
    return Login(tmp_path)


def test_three_made_at_once_reach_each_other_by_address_and_name_and_the_host(
    patient: Platform, login: Login
) -> None:
    def made(name: str) -> Json:
        return patient.create(name, "--ssh-key", login.public_key, wait="ready")

    with ThreadPoolExecutor(3) as pool:
        views = list(pool.map(made, ("one", "two", "three")))
    assert len({address(view) for view in views}) == 3
    assert len({view["interfaces"][0]["mac"] for view in views}) == 3
    assert all(host.ping(address(view)) for view in views)
    one, two, _three = views
    gateway = one["interfaces"][0]["gateway"]
    assert "1 packets received" in login(one, f"ping -c 1 -W 5 {address(two)}")
    assert "1 packets received" in login(two, f"ping -c 1 -W 5 {address(one)}")
    assert "1 packets received" in login(one, f"ping -c 1 -W 5 {gateway}")
    assert login(one, "cat /etc/resolv.conf") == (
        f"search default.vm.internal\nnameserver {gateway}\n"
    )
    for name in ("two.default.vm.internal", "two"):
        assert address(two) in login(one, f"nslookup {name}")
    assert "1 packets received" in login(one, "ping -c 1 -W 5 two")
    assert "NXDOMAIN" in login(one, "nslookup two.other.vm.internal 2>&1 || :")
    all_continues_without_netd(patient, login, one, two)
    patient.delete("one", "two", "three")


def all_continues_without_netd(platform: Platform, login: Login, one: Json, two: Json) -> None:
    """Names, addresses and forwarding while netd is stopped, killed and started again."""
    before = login(one, "ip -4 addr show eth0")

    def works() -> None:
        assert address(two) in login(one, "nslookup two.default.vm.internal")
        assert "3 packets received" in login(one, "ping -c 3 -i 0.2 -W 1 two")

    stopped = platform.kill("netd", signal.SIGSTOP)
    works()
    os.kill(stopped, signal.SIGKILL)
    for _time in range(5):
        works()
    platform.wait_back("netd", stopped)
    # Only now: udhcpc gives up its address if a renewal by this signal gets no answer for 18 s.
    login(one, "kill -USR1 $(pidof udhcpc)")
    works()
    assert login(one, "ip -4 addr show eth0") == before


def test_disks_are_as_large_as_asked_for_and_an_empty_one_is_empty(
    platform: Platform, login: Login, tmp_path: Path
) -> None:
    wanted = tmp_path / "vm.yaml"
    wanted.write_text(
        f"""
name: disks
memory: 128MiB
image: tiny
disk: 1GiB
ssh_keys: ["{Path(login.public_key).read_text().strip()}"]
spec:
  volumes:
    - {{name: data, empty_disk: {{capacity: 64MiB}}}}
"""
    )
    view = platform.create("disks", "-f", str(wanted), wait="ready")
    sizes = login(view, "cat /sys/block/vd*/size").split()
    assert str(1024**3 // 512) in sizes
    assert str(64 * 1024**2 // 512) in sizes
    until(
        lambda: int(login(view, "df -m / | tail -n 1").split()[1]) > 800, "the root takes the room"
    )
    empty = sizes.index(str(64 * 1024**2 // 512))
    names = login(view, "ls -d /sys/block/vd*").split()
    device = names[empty].rpartition("/")[2]
    assert login(view, f"tr -d '\\0' </dev/{device} | wc -c").strip() == "0"
    login(view, f"mke2fs -q /dev/{device} 2>/dev/null || echo x >/dev/{device}")


def test_a_guest_boots_from_sata_and_has_its_other_disks_and_its_seed_there(
    platform: Platform, login: Login, tmp_path: Path
) -> None:
    key = Path(login.public_key).read_text().strip()
    wanted = tmp_path / "vm.yaml"
    wanted.write_text(
        f"""
name: sata
memory: 128MiB
spec:
  domain:
    devices:
      disks:
        - {{name: root, bus: sata}}
        - {{name: data, bus: sata}}
        - {{name: seed, bus: sata, device: cdrom}}
  volumes:
    - {{name: root, image: {{ref: tiny}}}}
    - {{name: data, empty_disk: {{capacity: 64MiB}}}}
    - {{name: seed, cloud_init_no_cloud: {{ssh_keys: ["{key}"]}}}}
"""
    )
    view = platform.create("sata", "-f", str(wanted), wait="ready")
    # the login itself proves the seed
    assert login(view, "cd /sys/block; echo *").split() == ["sda", "sdb", "sr0"]
    # Linux probes the disks in parallel, so their names may be in any order: sort by SATA port
    ports = login(view, "for disk in /sys/block/sd*; do (cd -P $disk; pwd); done")
    root, data = (port.rpartition("/")[2] for port in sorted(ports.split()))
    assert login(view, f"cat /sys/block/{data}/size").strip() == str(64 * 1024**2 // 512)
    login(view, f"echo kept | dd of=/dev/{data} conv=fsync 2>/dev/null")
    assert login(view, f"head -n 1 /dev/{data}; findfs LABEL=tiny-root").split() == [
        "kept",
        f"/dev/{root}2",
    ]


def test_two_nics_have_two_addresses(platform: Platform, tmp_path: Path) -> None:
    wanted = tmp_path / "vm.yaml"
    wanted.write_text(
        """
name: two
memory: 128MiB
image: tiny
spec:
  networks: [{name: first}, {name: second}]
"""
    )
    view = platform.create("two", "-f", str(wanted), wait="ready")
    assert [nic["name"] for nic in view["interfaces"]] == ["first", "second"]
    assert address(view, 0) != address(view, 1)
    log = until(
        lambda: "GUEST-NICS" in (text := platform.console_log("two")) and text,
        "NICs on the console",
    )
    for nic in (0, 1):
        mac = view["interfaces"][nic]["mac"]
        assert f"{mac}/{address(view, nic)}" in log
    # not the second: a guest answers from its first NIC, and anti-spoofing drops that
    assert host.ping(address(view, 0))


def test_guest_on_a_cni_network_takes_the_plugins_address_and_spoofs_no_other(
    platform: Platform, login: Login, cni_network: str, tmp_path: Path
) -> None:
    until(lambda: cni_network in platform.cli("network", "list"), "netd tells of the network")
    of_plugins = ("--kind", "cni", "--conflist", cni_network)
    platform.cli("network", "create", "team", *of_plugins, "--dns", "192.0.2.53", "--mtu", "1400")
    view = platform.create("cni", "--network", "team", "--ssh-key", login.public_key, wait="ready")
    assert address(view).startswith("10.199.0.")
    assert host.ping(address(view))
    assert view["interfaces"][0]["mac"] in login(view, "cat /sys/class/net/eth0/address")
    shown = login(view, "ip -4 address show eth0; cat /etc/resolv.conf /sys/class/net/eth0/mtu")
    assert all(text in shown for text in (f"inet {address(view)}/24", "192.0.2.53", "1400"))
    uses_ipv6_and_reaches_no_port_of_its_host(view, login)
    frames = spoofed(view["interfaces"][0])
    sent = Crafter(tmp_path, login, view).send("eth0", (frame for _, frame in frames))
    assert sent == len(frames)
    shown = json.loads(platform.cli("vm", "get", "cni", "--counters", "-o", "json"))
    counted, rules = shown["counters"][0]["refused"], [rule for rule, _ in frames]
    assert all(counted.get(rule, 0) >= rules.count(rule) for rule in rules), counted
    platform.delete("cni")
    platform.cli("network", "delete", "team")
    results = Path("/var/lib/cni/results")
    until(lambda: not list(results.glob(f"{cni_network}*")), "results removed")
    left = [p.name for p in Path("/var/lib/cni/networks", cni_network).glob("*::*")]
    left += [p.name for p in Path("/var/lib/cni/networks", cni_network).glob("10.199*")]
    assert left == []


def uses_ipv6_and_reaches_no_port_of_its_host(view: Json, login: Login) -> None:
    six = view["interfaces"][0]["addresses"][1].partition("/")[0]
    device = "ip -6 addr show eth0 scope global"
    until(lambda: f"{six}/128" in login(view, device), f"{six} by DHCPv6")
    assert "default via fe80::" in login(view, "ip -6 route show default")
    gateways = "10.199.0.1", "fd00:199::1"
    for gateway in gateways:
        login(view, f"ping -c 1 -W 5 {gateway}")
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        for gateway in gateways:
            login(view, f"timeout 3 nc -w 2 {gateway} {port} </dev/null || true")
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
        with socket.create_connection((gateways[0], port)):
            server.accept()[0].close()
