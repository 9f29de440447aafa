"""The platform's inputs to a guest: its seed, its disks, its networks, its console."""

import json
import os
import pty
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.e2e import host
from tests.e2e.frames import Crafter, spoofed
from tests.e2e.login import Login
from tests.e2e.platform import Json, Platform, Refused, address, until

pytestmark = pytest.mark.e2e

SEED = """#cloud-config
write_files:
  - path: /etc/motd.virtbus
    permissions: '0640'
    content: |
      a line with "quotes" & $dollars
runcmd:
  - [sh, -c, 'echo ran > /root/ran-by-runcmd']
"""


@pytest.fixture
def login(tmp_path: Path) -> Login:
    return Login(tmp_path)


def test_seed_gives_hostname_key_files_and_commands(
    platform: Platform, login: Login, tmp_path: Path
) -> None:
    seed = tmp_path / "seed.yaml"
    seed.write_text(SEED)
    view = platform.create(
        "web", "--ssh-key", login.public_key, "--user-data", str(seed), wait="ready"
    )
    assert login(view, "hostname").strip() == "web"
    assert login(view, "cat /etc/motd.virtbus") == 'a line with "quotes" & $dollars\n'
    assert login(view, "stat -c %a /etc/motd.virtbus").strip() == "640"
    until(lambda: login(view, "cat /root/ran-by-runcmd 2>&1 || :") == "ran\n", "runcmd ran")
    record = platform.cli("vm", "get", "web", "-o", "json")
    assert "motd.virtbus" not in record, "user data is a secret and is not shown"


def test_guests_reach_each_other_by_address_and_name_and_the_host(
    patient: Platform, login: Login
) -> None:
    one = patient.create("one", "--ssh-key", login.public_key, wait="")
    two = patient.create("two", "--ssh-key", login.public_key, wait="")
    one, two = patient.wait_ready("one", "two")
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


@pytest.fixture
def internet() -> Iterator[str]:
    """The address of a machine beyond our default route; it has no route to guests."""
    name, ours, theirs = "e2e-internet", "198.51.100.1", "198.51.100.2"
    ip: Callable[..., str] = lambda *argv: host.run("ip", *argv)  # noqa: E731
    ip("netns", "add", name)
    try:
        ip("link", "add", "e2e-up", "type", "veth", "peer", "name", "e2e-far", "netns", name)
        ip("address", "add", f"{ours}/24", "dev", "e2e-up")
        ip("link", "set", "e2e-up", "up")
        ip("-n", name, "address", "add", f"{theirs}/24", "dev", "e2e-far")
        ip("-n", name, "link", "set", "e2e-far", "up")
        ip("route", "add", "default", "via", theirs)
        yield theirs
    finally:
        ip("netns", "delete", name)
        with suppress(AssertionError):
            ip("link", "delete", "e2e-up")


def test_guest_reaches_the_outside_through_masquerade(
    platform: Platform, login: Login, internet: str
) -> None:
    view = platform.create("out", "--ssh-key", login.public_key, wait="ready")
    # no route leads back to 10.127/16 from there, so an answer proves the translation
    assert "1 packets received" in login(view, f"ping -c 1 -W 5 {internet}")


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


def test_the_console_accepts_typed_input(platform: Platform) -> None:
    platform.create("con", wait="ready")
    until(lambda: "GUEST-READY" in platform.console_log("con"), "its shell")
    done = platform.try_cli(
        "vm", "console", "con", "--linger", "5", input_text="\necho typed-$((6*7))\n"
    )
    assert "typed-42" in done.stdout, done.stderr


def test_console_on_a_terminal_leaves_with_its_escape_and_the_guest_runs_on(
    platform: Platform,
) -> None:
    view = platform.create("con", wait="ready")
    until(lambda: "GUEST-READY" in platform.console_log("con"), "its shell")
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        ["virtbus", "vm", "console", "con"],
        env=platform.environ,
        stdin=follower,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    try:
        _read_until(leader, b"console of con")
        os.write(leader, b"\necho at-$((40+2))\n")
        _read_until(leader, b"at-42")
        os.write(leader, b"\x1d")
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    assert host.ping(address(view))


def _read_until(descriptor: int, word: bytes, within_s: float = 20) -> None:
    seen = b""
    deadline = time.monotonic() + within_s
    while word not in seen:
        ready, _, _ = select.select([descriptor], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"{word!r} not in {seen!r}"
        data = os.read(descriptor, 4096)
        assert data, f"ended before {word!r}: {seen!r}"
        seen += data


def test_logs_follow_the_guests_output(platform: Platform) -> None:
    platform.create("log", wait="running")
    following = platform.start_cli("vm", "logs", "log", "-f")
    try:
        assert following.stdout is not None
        _read_until(following.stdout.fileno(), b"GUEST-NICS", within_s=60)
    finally:
        following.terminate()
        following.communicate(timeout=10)


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


def test_a_guest_without_an_agent_is_reported_with_the_next_step(platform: Platform) -> None:
    platform.create("mute", wait="ready")
    with pytest.raises(Refused) as refused:
        platform.cli("vm", "guest", "mute", "-o", "json")
    assert refused.value.error["reason"] == "guest_agent_absent"
    assert "install and start qemu-guest-agent" in refused.value.error["message"]
