"""Netlink requests and answers, over real sockets unless noted."""

import errno
import os
import struct
import subprocess
import sys
from ipaddress import IPv4Interface, IPv6Interface

import pytest
from services.netd.tests.pretended_host import Host

from virtbus.netd.core import host_end, link_addresses
from virtbus.netd.core.names import owner_mark
from virtbus.netd.core.netlink import NLM_F_DUMP_INTR, NLMSG_DONE
from virtbus.netd.edge import links
from virtbus.netd.edge.netlink import Netlink, NetlinkError

pytestmark = pytest.mark.integration

DUMP = struct.Struct("=IHHIIi")


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout


class Wire:
    """A kernel that ends each list at once; the first `interrupted` lists changed meanwhile."""

    def __init__(self, interrupted: int) -> None:
        self.interrupted = interrupted
        self.asked = 0

    def send(self, data: bytes) -> None:
        self.asked += 1
        (self._sequence,) = struct.unpack_from("=I", data, 8)

    def recv(self, _size: int) -> bytes:
        flags = NLM_F_DUMP_INTR if self.asked <= self.interrupted else 0
        return DUMP.pack(DUMP.size, NLMSG_DONE, flags, self._sequence, 0, 0)

    def close(self) -> None:
        return


def over(wire: Wire) -> Netlink:
    netlink = Netlink()
    netlink._socket.close()
    netlink._socket = wire  # type: ignore[assignment]  # the wire is where a fake may stand
    return netlink


def test_a_list_that_changed_while_it_was_read_is_requested_again() -> None:
    wire = Wire(interrupted=2)
    assert links.list_links(over(wire)) == []
    assert wire.asked == 3


def test_a_list_that_always_changes_is_an_error_that_names_it() -> None:
    with pytest.raises(NetlinkError, match="list links") as refused:
        links.list_links(over(Wire(interrupted=1000)))
    assert refused.value.errno == errno.EAGAIN


def test_a_bridge_is_made_once_with_the_requested_settings(host: Host) -> None:
    with Netlink() as netlink:
        bridge = links.new_bridge("vbtest0", index=1234, mac="02:00:00:00:00:07")
        netlink.do([bridge, bridge, host_end.no_ipv6("vbtest0")])
        netlink.do([links.set_link("vbtest0", up=True, mtu=1400, alias="whose")])
        made = links.find(netlink, "vbtest0")
        shown = ip("-d", "link", "show", "vbtest0")
        addresses = ip("address", "show", "vbtest0")
        netlink.do([links.delete_link("vbtest0"), links.delete_link("vbtest0")])
        assert links.find(netlink, "vbtest0") is None
    assert made is not None
    assert (made.index, made.up, made.mtu, made.alias) == (1234, True, 1400, "whose")
    assert (made.mac, made.master) == ("02:00:00:00:00:07", 0)
    for word in ("forward_delay 0", "stp_state 0", "mcast_snooping 0", "addrgenmode none"):
        assert word in shown
    assert "inet6" not in addresses


def test_a_veth_leads_into_another_namespace(host: Host) -> None:
    with Netlink() as outside:
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            outside.do([host_end.new_veth("vbtest1", "eth0", before, peer_mac="02:00:00:00:00:08")])
            ends = {link.name: link.mac for link in links.list_links(outside)}
        finally:
            os.close(before)
        outside.do([links.delete_link("vbtest1")])
    assert ends["eth0"] == "02:00:00:00:00:08"
    assert "vbtest1" in ends


@pytest.mark.parametrize("interface", [IPv4Interface("10.9.8.7/24"), IPv6Interface("fd00::7/64")])
def test_addresses_of_both_families_come_and_go(
    host: Host, interface: IPv4Interface | IPv6Interface
) -> None:
    with Netlink() as netlink:
        netlink.do(
            [link_addresses.add_address(1, interface), link_addresses.add_address(1, interface)]
        )
        assert link_addresses.KernelAddress(1, interface, is_global=True) in links.list_addresses(
            netlink
        )
        netlink.do(
            [
                link_addresses.delete_address(1, interface),
                link_addresses.delete_address(1, interface),
            ]
        )
        assert interface not in [each.interface for each in links.list_addresses(netlink)]


def test_a_refusal_names_the_call_and_those_after_it_are_done(host: Host) -> None:
    with Netlink() as netlink:
        calls = [links.set_link("nowhere", up=True), links.set_link("lo", alias="done")]
        with pytest.raises(NetlinkError, match="set nowhere") as refused:
            netlink.do(calls)
        lo = links.find(netlink, "lo")
    assert refused.value.errno == errno.ENODEV
    assert lo is not None
    assert lo.alias == "done"


def test_an_alias_of_any_bytes_is_read(host: Host) -> None:
    command = [b"ip", b"link", b"set", b"lo", b"alias", b"caf\xe9"]
    subprocess.run(command, check=True)
    with Netlink() as netlink:
        assert [link.alias for link in links.list_links(netlink)] == ["caf\ufffd"]


def test_the_longest_mark_is_an_alias_that_the_kernel_takes(host: Host) -> None:
    longest = max((owner_mark("/" + "x" * length) for length in range(300)), key=len)
    with Netlink() as netlink:
        netlink.do([links.set_link("lo", alias=longest)])
        lo = links.find(netlink, "lo")
    assert lo is not None
    assert lo.alias == longest


def test_only_the_messages_of_pyroute2_are_loaded() -> None:
    """The package loads everything, including sockets with event loops: 6 MB in each netd."""
    script = (
        "import sys, virtbus.netd.__main__\n"
        "print(*(name for name in sys.modules if name.startswith('pyroute2.')))\n"
    )
    command = [sys.executable, "-c", script]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "pyroute2.netlink.rtnl.ifinfmsg" in loaded
    assert not [
        name for name in loaded if name.split(".")[1] not in {"common", "config", "netlink"}
    ]
    assert "pyroute2.netlink.nlsocket" not in loaded


def test_threads_that_write_their_first_messages_together_write_the_same() -> None:
    """pyroute2 builds its tables when a message is first written; eight attaches may be first."""
    script = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "import sys\n"
        "sys.setswitchinterval(1e-6)\n"
        "from virtbus.netd.edge import links\n"
        "def write(_):\n"
        "    bridge = links.new_bridge('br0', mac='02:00:00:00:00:01')\n"
        "    return bridge.body + links.set_link('lo', up=True, alias='x').body\n"
        "with ThreadPoolExecutor(16) as pool:\n"
        "    print(len(set(pool.map(write, range(64)))))\n"
    )
    for _round in range(5):
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == "1\n"
