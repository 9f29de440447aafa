"""Guests of plain QEMU, with taps on a bridge, in a network namespace that nobody else touches."""

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench.rawvirt import OVERLAY, QEMU

from virtbus.nodeagent.core.user_data import to_yaml
from virtbus.nodeagent.edge.seed_iso import iso

BRIDGE, HOST = "plainbr0", "10.98.0.1"
CPU_HIERARCHIES = frozenset({"cpu", "cpu,cpuacct", ""})
"""Hierarchies of control groups that may have the shares of CPU; version 2 has one for all."""
BOOT_S, READY = 120.0, b"GUEST-READY"
"""The guests report their network within this, on a busy machine without KVM."""
MAIN_THREAD = "qemu-system-x86"
KEPT = frozenset({"-accel", "-cpu", "-m", "-smp", "-sandbox"})
"""Options of a VM's own QEMU that its plain counterpart gets, too."""


@dataclass(frozen=True, slots=True)
class PlainGuest:
    """A running guest, its tap, and the pid of its QEMU."""

    address: str
    tap: str
    pid: int

    @property
    def view(self) -> dict[str, list[dict[str, list[str]]]]:
        """Return what a login needs of a VM's view."""
        return {"interfaces": [{"addresses": [f"{self.address}/24"]}]}


@contextmanager
def plain_network() -> Iterator[tuple[str, ...]]:
    """Make the namespace with its bridge; yield the words before a command that runs in it.

    It goes with the process that holds it. The host's rules and connection tracking do not act
    there, as on a host without virtbus.
    """
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    try:
        enter = ("nsenter", "--net", "--target", str(holder.pid))
        _wait_until_apart(holder.pid)
        for words in (
            "link set lo up",
            f"link add {BRIDGE} type bridge forward_delay 0",
            f"address add {HOST}/24 dev {BRIDGE}",
            f"link set {BRIDGE} up",
        ):
            _ip(enter, words)
        yield enter
    finally:
        holder.kill()
        holder.wait()


def _wait_until_apart(pid: int) -> None:
    own = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{pid}/ns/net") == own:
        pass


@contextmanager
def plain_guests(
    enter: Sequence[str], folder: Path, disk: Path, key: str, like: int
) -> Iterator[list[PlainGuest]]:
    """Start two guests of `disk` with the public key `key`; yield them once they are ready.

    `like` is the pid of a VM's QEMU.
    """
    argv = Path(f"/proc/{like}/cmdline").read_bytes().decode().split("\0")
    options = [word for at, name in enumerate(argv) if name in KEPT for word in argv[at : at + 2]]
    with ExitStack() as stack:
        guests = [
            stack.enter_context(_guest(enter, folder, disk, key, options, number))
            for number in (2, 3)
        ]
        deadline = time.monotonic() + BOOT_S
        for guest in guests:
            console = folder / f"{guest.tap}.log"
            while READY not in console.read_bytes():
                assert time.monotonic() < deadline, console.read_text()
                time.sleep(0.1)
        yield guests


@contextmanager
def _guest(
    enter: Sequence[str], folder: Path, disk: Path, key: str, options: list[str], number: int
) -> Iterator[PlainGuest]:
    name, mac, address = f"plain{number}", f"52:54:00:98:00:0{number}", f"10.98.0.{number}"
    overlay, seed = folder / f"{name}.qcow2", folder / f"{name}.iso"
    subprocess.run([*OVERLAY, "-F", "qcow2", "-b", str(disk), str(overlay)], check=True)
    seed.write_bytes(iso(_first_boot(name, mac, address, key), "cidata"))
    _ip(enter, f"tuntap add {name} mode tap")
    _ip(enter, f"link set {name} master {BRIDGE} up")
    argv = [
        *(
            QEMU,
            "-name",
            f"guest={name},debug-threads=on",
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-machine",
            "q35",
        ),
        *options,
        *("-serial", f"file:{folder / name}.log"),
        *("-drive", f"file={overlay},if=virtio,format=qcow2"),
        *("-drive", f"file={seed},if=virtio,format=raw,readonly=on"),
        *("-netdev", f"tap,id=n,ifname={name},script=no,downscript=no"),
        *("-device", "pcie-root-port,id=above,chassis=1"),  # a VM's NIC is on one, too
        *("-device", f"virtio-net-pci,netdev=n,mac={mac},bus=above,romfile="),
    ]
    (folder / f"{name}.log").touch()
    process = subprocess.Popen([*enter, *argv], stdin=subprocess.DEVNULL)
    try:
        yield PlainGuest(address, name, process.pid)
    finally:
        process.kill()
        process.wait()


def share_cpu(plain: int, vm: int) -> None:
    """Put each thread of a plain QEMU into the group for CPU of its counterpart of a VM's QEMU.

    Otherwise a busy host gives them other shares: libvirt has groups of its own for each domain.
    """
    groups = {name: group for _, name, group in _threads(vm)}
    for tid, name, _ in _threads(plain):
        group = groups.get(name, groups[MAIN_THREAD])
        members = next(one for one in (group / "tasks", group / "cgroup.threads") if one.exists())
        members.write_text(str(tid))


def _threads(pid: int) -> Iterator[tuple[int, str, Path]]:
    """Yield the number, the name and the group for CPU of each thread."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = [one.split(":", 2) for one in (task / "cgroup").read_text().splitlines()]
        found = {kind: path for _, kind, path in lines if kind in CPU_HIERARCHIES}
        kind = max(found)
        group = Path("/sys/fs/cgroup", kind, found[kind].lstrip("/"))
        yield int(task.name), (task / "comm").read_text().strip(), group


def _first_boot(name: str, mac: str, address: str, key: str) -> dict[str, bytes]:
    nic = {"match": {"macaddress": mac}, "addresses": [f"{address}/24"]}
    return {
        "meta-data": to_yaml({"instance-id": name, "local-hostname": name, "public-keys": [key]}),
        "user-data": b"#cloud-config\n",
        "network-config": to_yaml({"version": 2, "ethernets": {"eth0": nic}}),
    }


def _ip(enter: Sequence[str], words: str) -> None:
    subprocess.run([*enter, "ip", *words.split()], check=True)
