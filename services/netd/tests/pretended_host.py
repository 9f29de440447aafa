"""A network namespace that plays the host, and guests made of frames over a tap descriptor."""

import asyncio
import concurrent.futures
import ctypes
import errno
import os
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv6Interface
from pathlib import Path
from typing import Any

import pytest

from virtbus.netd.attachments import Attachments
from virtbus.netd.builder import HostPorts
from virtbus.netd.core.address_assignment import addressed, leased
from virtbus.netd.core.attachment import Attachment, NicKind
from virtbus.netd.core.dhcp import DhcpLease
from virtbus.netd.core.dhcp_offer import DhcpSettings
from virtbus.netd.core.gateways import Gateways
from virtbus.netd.core.masquerade import guest_side
from virtbus.netd.core.names import mac_bytes, netns
from virtbus.netd.core.node_groups import NodeGroupBook
from virtbus.netd.core.reach import ReachRules
from virtbus.netd.core.resolver_messages import ResolverSite
from virtbus.netd.edge import links
from virtbus.netd.edge.attachers import Attachers
from virtbus.netd.edge.attachment_store import AttachmentStore
from virtbus.netd.edge.cni import Cni
from virtbus.netd.edge.cni_cache import CniCache
from virtbus.netd.edge.dhcp_server import DhcpServer
from virtbus.netd.edge.guest_links import GuestLinks
from virtbus.netd.edge.host_bridge import HostBridge
from virtbus.netd.edge.host_bridges import HostBridges
from virtbus.netd.edge.namespaces import Namespaces
from virtbus.netd.edge.netlink import Netlink
from virtbus.netd.edge.published_ports import PublishedPorts
from virtbus.netd.edge.qemu_processes import QemuProcesses
from virtbus.netd.edge.segments import Segments
from virtbus.netd.edge.tunnels import Tunnels
from virtbus.netd.names_keeper import NamesKeeper
from virtbus.schemas.counters import Counters
from virtbus.schemas.node_rpc import NetReady
from virtbus.schemas.vm import VmRecord

CLONE_NEWNET = 0x40000000
VNET_HEADER = bytes(10)
libc = ctypes.CDLL(None, use_errno=True)


def enter(fd: int) -> None:
    assert libc.setns(fd, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


def _links_here() -> set[str]:
    with Netlink() as netlink:
        return {link.name for link in links.list_links(netlink)}


@dataclass
class Host:
    """The simulated host: its paths, and its objects."""

    tmp: Path
    namespaces: Namespaces

    def census(self) -> dict[str, Any]:
        """Return the objects that must be equal before and after."""
        tables = subprocess.run(
            ["nft", "list", "tables"], capture_output=True, text=True, check=True
        ).stdout
        return {
            "links": _links_here(),
            "netns": sorted(self.namespaces.names()),
            "tables": tables,
            "ip_forward": Path("/proc/sys/net/ipv4/ip_forward").read_text(),
            "forwarding6": Path("/proc/sys/net/ipv6/conf/all/forwarding").read_text(),
            "fds": len(os.listdir("/proc/self/fd")),
        }

    async def returns_to(self, before: dict[str, Any]) -> None:
        """Return once the census is `before` again; the kernel frees objects a little later."""
        try:
            await eventually(lambda: self.census() == before)
        except TimeoutError:
            now = self.census()
            changed = {key: (before[key], now[key]) for key in now if now[key] != before[key]}
            assert not changed, changed


@contextmanager
def pretended_host(tmp_path: Path) -> Iterator[Host]:
    """Run the test in a network namespace of its own; leave nothing behind."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    before = os.open("/proc/self/ns/net", os.O_RDONLY)
    assert libc.unshare(CLONE_NEWNET) == 0
    # a new namespace inherits it from a machine that, for example, runs Docker
    Path("/proc/sys/net/ipv4/ip_forward").write_text("0")
    directory = tmp_path / "netns"
    namespaces = Namespaces(directory)
    try:
        namespaces.prepare()
        with Netlink() as netlink:
            netlink.do([links.set_link("lo", up=True)])
        yield Host(tmp_path, namespaces)
    finally:
        for name in namespaces.names():
            namespaces.remove(name)
        while libc.umount2(str(directory).encode(), 2) == 0:
            pass
        assert ctypes.get_errno() in {errno.EINVAL, errno.ENOENT}
        enter(before)
        os.close(before)


def settled(plan: Attachment, gateway: IPv4Interface, taken: Collection[str] = ()) -> Attachment:
    """Return a plan with addresses of the gateway's subnet for all its bridged interfaces."""
    used, nics = set(taken), []
    for nic in plan.nics:
        given = nic if nic.kind is NicKind.CNI else addressed(nic, plan.uid, [gateway], used)
        used.update(address.partition("/")[0] for address in given.addresses)
        nics.append(given)
    return plan.model_copy(update={"nics": tuple(nics)})


def make_record(uid: str, *, networks: tuple[str, ...] = ("default",), **extra: Any) -> VmRecord:
    """A record with one interface per network; `nics` has further properties of each.

    `more_spec` has further fields of the spec.
    """
    names = [f"net{index}" for index in range(len(networks))]
    macs = extra.pop("macs", (None,) * len(networks))
    nics = extra.pop("nics", ({},) * len(networks))
    spec = {
        **extra.pop("more_spec", {}),
        "domain": {
            **extra.pop("domain", {}),
            "devices": {
                "interfaces": [
                    {"name": name, "mac_address": mac, **nic}
                    for name, mac, nic in zip(names, macs, nics, strict=True)
                ]
            },
        },
        "networks": [
            {"name": name, "network": network}
            for name, network in zip(names, networks, strict=True)
        ],
    }
    return VmRecord.model_validate(
        {
            "uid": uid,
            "namespace": "default",
            "name": f"vm-{uid[:4]}",
            "spec": spec,
            "spec_hash": "",
            "node": "n1",
            "created_ns": 0,
            **extra,
        }
    )


def checksum(data: bytes) -> int:
    data += bytes(len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


class Frames:
    """Makes frames of a guest with a MAC and an address."""

    def __init__(self, mac: str, address: str) -> None:
        self.mac = mac_bytes(mac)
        self.ip = IPv4Interface(address).ip

    def arp(
        self,
        operation: int,
        to: bytes,
        asked: IPv4Address,
        *,
        target: bytes = bytes(6),
        sender: tuple[bytes, IPv4Address] | None = None,
        source: bytes | None = None,
    ) -> bytes:
        mac, ip = sender or (self.mac, self.ip)
        body = struct.pack("!HHBBH", 1, 0x0800, 6, 4, operation)
        return (
            to + (source or self.mac) + b"\x08\x06" + body + mac + ip.packed + target + asked.packed
        )

    def ipv4(
        self,
        to: bytes,
        destination: IPv4Address,
        protocol: int,
        payload: bytes,
        *,
        source: IPv4Address | None = None,
        source_mac: bytes | None = None,
    ) -> bytes:
        header = struct.pack(
            "!BBHHHBBH4s4s",
            0x45,
            0,
            20 + len(payload),
            0,
            0,
            64,
            protocol,
            0,
            (self.ip if source is None else source).packed,
            destination.packed,
        )
        header = header[:10] + struct.pack("!H", checksum(header)) + header[12:]
        return to + (source_mac or self.mac) + b"\x08\x00" + header + payload

    def udp(
        self,
        to: bytes,
        destination: IPv4Address,
        ports: tuple[int, int],
        data: bytes,
        **options: Any,
    ) -> bytes:
        payload = struct.pack("!HHHH", *ports, 8 + len(data), 0) + data
        return self.ipv4(to, destination, 17, payload, **options)


class Guest(Frames):
    """A guest in user space: it sends through the tap descriptor that QEMU would get."""

    def __init__(self, fd: int, mac: str, address: str) -> None:
        super().__init__(mac, address)
        self.fd = fd
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self._read)

    def _read(self) -> None:
        try:
            frame = os.read(self.fd, 65536)[10:]
        except OSError:
            return
        if (
            frame[12:14] == b"\x08\x06"
            and frame[20:22] == b"\0\1"
            and frame[38:42] == self.ip.packed
        ):
            self.send(self.arp(2, frame[22:28], IPv4Address(frame[28:32]), target=frame[22:28]))
        elif frame[12:14] == b"\x08\x00" and frame[23] == 1 and frame[34] == 8:
            self._echo(frame)
        self.frames.put_nowait(frame)

    def _echo(self, frame: bytes) -> None:
        icmp = b"\0\0\0\0" + frame[38:]
        icmp = icmp[:2] + struct.pack("!H", checksum(icmp)) + icmp[4:]
        self.send(self.ipv4(frame[6:12], IPv4Address(frame[26:30]), 1, icmp))

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.fd)
        os.close(self.fd)

    def send(self, frame: bytes) -> None:
        os.write(self.fd, VNET_HEADER + frame)

    async def receive(self, wanted: Callable[[bytes], bool], timeout_s: float = 5.0) -> bytes:
        """Return the next `wanted` frame; TimeoutError if none comes."""
        async with asyncio.timeout(timeout_s):
            while True:
                frame = await self.frames.get()
                if wanted(frame):
                    return frame

    async def resolve(self, address: IPv4Address) -> bytes:
        """Return the MAC of a neighbour by ARP."""
        for _attempt in range(20):
            self.send(self.arp(1, b"\xff" * 6, address))
            try:
                frame = await self.receive(
                    lambda f: (
                        f[12:14] == b"\x08\x06"
                        and f[20:22] == b"\0\2"
                        and f[28:32] == address.packed
                    ),
                    timeout_s=0.25,
                )
            except TimeoutError:
                continue
            return frame[22:28]
        raise TimeoutError(f"{address} does not answer ARP")

    async def ping(self, address: IPv4Address, via: IPv4Address | None = None) -> None:
        """Return once an echo reply of `address` came; TimeoutError if none does."""
        mac = await self.resolve(via or address)
        icmp = struct.pack("!BBHHH", 8, 0, 0, 7, 1) + b"virtbus"
        icmp = icmp[:2] + struct.pack("!H", checksum(icmp)) + icmp[4:]
        self.send(self.ipv4(mac, address, 1, icmp))
        await self.receive(
            lambda f: (
                f[12:14] == b"\x08\x00" and f[23] == 1 and f[34] == 0 and f[26:30] == address.packed
            )
        )


async def ping_from_host(address: str, timeout_s: float = 5.0) -> None:
    """Return once `address` answers an echo request of this thread's namespace."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as raw:
        raw.setblocking(False)
        request = struct.pack("!BBHHH", 8, 0, 0, 9, 1) + b"hello"
        request = request[:2] + struct.pack("!H", checksum(request)) + request[4:]
        raw.sendto(request, (address, 0))
        async with asyncio.timeout(timeout_s):
            while True:
                packet = await loop.sock_recv(raw, 2048)
                if packet[20] == 0 and packet[24:26] == b"\0\x09":
                    return


async def eventually(check: Callable[[], bool], timeout_s: float = 45.0) -> None:
    """Return once `check` holds.

    The kernel frees the namespaces of all tests in one thread. On a busy machine, that may take
    more than ten seconds.
    """
    async with asyncio.timeout(timeout_s):
        while not check():
            await asyncio.sleep(0.01)


class Node:
    """netd's attachments wired as in its service; `restart` is a new process on the same host."""

    def __init__(
        self,
        host: Host,
        subnet: str = "10.127.0.1/16",
        lease_s: int = 3600,
        *,
        bridge: str = "virtbus0",
        state: str = "state",
        subnet6: str = "",
    ) -> None:
        self.host = host
        self.gateway6 = IPv6Interface(subnet6) if subnet6 else None
        self.bridge = bridge
        self.state_dir = host.tmp / state
        self.gateway = IPv4Interface(subnet)
        self.site = DhcpSettings(
            dns=(IPv4Address("192.0.2.53"),),
            domain="vms.example",
            search=("vms.example", "example"),
            lease_s=lease_s,
        )
        self.site_of_names = ResolverSite(
            version="1",
            code="1",
            node="n1",
            domain="vm.internal",
            gateway=str(self.gateway),
            gateway6=subnet6,
            servers=tuple(map(str, self.site.dns)),
            socket=str(host.tmp / "names.sock"),
        )
        self.conf_dir = host.tmp / "cni"
        self.conf_dir.mkdir(exist_ok=True)
        self.bin_dirs = (host.tmp / "cni-bin", Path("/usr/lib/cni"))
        self.links_allowed: tuple[str, ...] = ("br-lan",)
        self.reach = ReachRules()
        self.plugin_timeout_s = 2.0
        self.begun: list[NetReady] = []
        self.groups = NodeGroupBook()
        self.leases: asyncio.Queue[tuple[str, int, DhcpLease]] = asyncio.Queue()
        self.doors: HostPorts
        self.attachments: Attachments

    async def start(self) -> None:
        self.wire()
        await self.attachments.recover()

    def wire(self) -> None:
        """Make the objects of a new process."""
        state = self.state_dir / "netd"
        gateways = Gateways(self.gateway, self.gateway6)
        bridge = HostBridge(self.bridge, gateways, state / "host.json", self.state_dir, self.reach)
        cni = Cni(
            self.conf_dir,
            self.bin_dirs,
            CniCache(state / "cni" / "results"),
            plugin_timeout_s=self.plugin_timeout_s,
            openings={"*": ("*",), "team-only": ("team",)},
            allowed=("bridge", "host-local"),
        )
        bridges = HostBridges(bridge, "n1")
        self.doors = HostPorts(
            attachers=Attachers(bridges, cni, Segments(self.links_allowed), Tunnels(bridges)),
            namespaces=self.host.namespaces,
            groups=self.groups,
            bridge=bridge,
            ports=PublishedPorts(bridges),
            files=AttachmentStore(state / "vms"),
            cni=cni,
            dhcp=DhcpServer(),
            emulators=QemuProcesses(Path(sys.executable)),
            resolver=NamesKeeper(self.site_of_names),
        )
        self.attachments = Attachments(self.doors, self.site)
        self.doors.dhcp.leased = lambda *lease: self.leases.put_nowait(lease)

    async def restart(self) -> None:
        self.stop()
        await self.start()

    def stop(self) -> None:
        self.doors.dhcp.close()
        self.doors.files.close()
        self.doors.attachers.plugin_reach.close()

    async def end(self) -> None:
        """Release all, and wait until the kernel has freed them."""
        for uid in list(self.attachments.resources()):
            await self.attachments.release(uid, 1_000)
        await self.attachments.tidy()
        self.stop()
        await eventually(lambda: _links_here() == {"lo"})

    async def attach(self, uid: str, **extra: Any) -> NetReady:
        async def begun(ready: NetReady) -> None:
            self.begun.append(ready)

        return await self.attachments.ensure(make_record(uid, **extra), begun)

    async def next_lease(self) -> NetReady | None:
        """Apply the next lease that a server of a segment gives, as the service does."""
        async with asyncio.timeout(5):
            uid, index, lease = await self.leases.get()
        reach = self.doors.bridge.reach
        return await self.attachments.amend(uid, lambda vm: leased(vm, index, lease, reach))

    @asynccontextmanager
    async def guest(self, uid: str, index: int = 0) -> AsyncIterator[Guest]:
        """A guest on one interface of an attached VM."""
        attachment, taps = await self.attachments.take_taps(uid, 5.0)
        nic = attachment.nics[index]
        own = guest_side(nic).addresses4
        guest = Guest(taps[index], nic.mac, own[0] if own else "0.0.0.0/0")
        try:
            yield guest
        finally:
            guest.close()
            for at, fd in enumerate(taps):
                if at != index:
                    os.close(fd)

    def counters(self, uid: str) -> Counters:
        """Return the counters of a VM's interfaces."""
        (attachment,) = [one for one in self.attachments.ready() if one.uid == uid]
        links_ = GuestLinks(self.doors.namespaces, self.doors.attachers, self.doors.groups)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:  # it enters the namespace
            return pool.submit(links_.counters, attachment).result()

    def inside(self, uid: str, command: str) -> str:
        """Return the output of a shell command in the VM's namespace."""
        path = self.host.namespaces.path(netns(uid))
        done = subprocess.run(
            ["nsenter", f"--net={path}", "sh", "-c", command],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout
