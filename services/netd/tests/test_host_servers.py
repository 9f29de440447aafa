"""The servers for other names: those of the setting, or of the host's file as it is now."""

import os
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from virtbus.netd.edge.host_servers import HostServers, name_servers

GATEWAY = IPv4Address("10.127.0.1")
TEXT = "# x\nnameserver 127.0.0.53\nnameserver fe80::1%eth0\nnameserver fd00::53 x\nnameserver\n"


def test_servers_on_loopback_and_of_ipv6_are_asked_and_those_of_an_interface_are_not() -> None:
    assert name_servers(TEXT) == (IPv4Address("127.0.0.53"), IPv6Address("fd00::53"))


def test_a_changed_file_is_read_again_and_the_gateway_is_never_asked(tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    servers = HostServers((), GATEWAY, path)
    assert servers.addresses() == ()
    path.write_text("nameserver 192.0.2.1\nnameserver 10.127.0.1\n")
    assert servers.addresses() == (IPv4Address("192.0.2.1"),)
    path.write_text("nameserver 192.0.2.2\n" * 2 + "nameserver rubbish\n" + TEXT)
    os.utime(path, ns=(1, 1))
    assert servers.addresses() == (
        IPv4Address("192.0.2.2"),
        IPv4Address("192.0.2.2"),
        IPv4Address("127.0.0.53"),
    )
    path.unlink()
    assert servers.addresses() == ()


def test_a_setting_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    path.write_text("nameserver 192.0.2.1\n")
    fixed = (IPv4Address("192.0.2.9"), GATEWAY)
    assert HostServers(fixed, GATEWAY, path).addresses() == (IPv4Address("192.0.2.9"),)
