"""Guests of plain QEMU on a bridge, with taps that only `ip` and QEMU touch."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench.rawvirt import QEMU

from virtbus.nodeagent.core.user_data import to_yaml
from virtbus.nodeagent.edge.seed_iso import iso

BRIDGE, HOST = "plainbr0", "10.98.0.1"
KEPT = ("-accel", "-cpu", "-m", "-smp")
"""Options of a VM's own QEMU that its plain counterpart gets, too."""


@dataclass(frozen=True, slots=True)
class PlainGuest:
    """A running guest; `view` has what a login needs of a VM's view."""

    address: str
    pid: int

    @property
    def view(self) -> dict[str, list[dict[str, list[str]]]]:
        return {"interfaces": [{"addresses": [f"{self.address}/24"]}]}


@contextmanager
def plain_guests(folder: Path, disk: Path, key: str, like: int) -> Iterator[list[PlainGuest]]:
    """Start two guests of `disk` with the public key `key`; `like` is the pid of a VM's QEMU."""
    _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("address", "add", f"{HOST}/24", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    argv = Path(f"/proc/{like}/cmdline").read_bytes().decode().split("\0")
    options = [word for at, name in enumerate(argv) if name in KEPT for word in argv[at : at + 2]]
    with ExitStack() as stack:
        yield [stack.enter_context(_guest(folder, disk, key, options, n)) for n in (2, 3)]


@contextmanager
def _guest(
    folder: Path, disk: Path, key: str, options: list[str], number: int
) -> Iterator[PlainGuest]:
    name, mac, address = f"plain{number}", f"52:54:00:98:00:0{number}", f"10.98.0.{number}"
    overlay, seed = folder / f"{name}.qcow2", folder / f"{name}.iso"
    made = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", str(disk)]
    subprocess.run([*made, str(overlay)], check=True)
    nic = {"match": {"macaddress": mac}, "addresses": [f"{address}/24"]}
    files = {
        "meta-data": to_yaml({"instance-id": name, "local-hostname": name, "public-keys": [key]}),
        "user-data": b"#cloud-config\n",
        "network-config": to_yaml({"version": 2, "ethernets": {"eth0": nic}}),
    }
    seed.write_bytes(iso(files, "cidata"))
    _ip("tuntap", "add", name, "mode", "tap")
    _ip("link", "set", name, "master", BRIDGE, "up")
    argv = [
        *(QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35"),
        *options,
        *("-serial", f"file:{folder / name}.log"),
        *("-drive", f"file={overlay},if=virtio,format=qcow2"),
        *("-drive", f"file={seed},if=virtio,format=raw,readonly=on"),
        *("-netdev", f"tap,id=n,ifname={name},script=no,downscript=no"),
        *("-device", f"virtio-net-pci,netdev=n,mac={mac}"),
    ]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    try:
        yield PlainGuest(address, process.pid)
    finally:
        process.kill()
        process.wait()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
