"""The host of a platform under test: a network namespace and our objects in it."""

import os
import secrets
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tests import census

LIBVIRTD_PID = Path("/run/libvirtd.pid")
BOX = Path("/run/virtbus-box")
"""Only a host that tests made for themselves has it (tests/hosts/box.sh)."""
OWN_NETNS = Path("/proc/self/ns/net")
UID_CHARS = 36
GUEST = "guest=vb-"
"""The name of a domain in the command line of its emulator, before the uid."""
PLATFORMS = "/var/tmp/virtbus-"
"""The prefix of each platform's folder."""
CNI_NETWORK = f"e2e-{secrets.token_hex(4)}"
"""The CNI network of these tests: other files below /var/lib/cni are not ours."""


def refuse_the_machines_own_network() -> None:
    """Raise unless this process is root in a network namespace of its own.

    Bridges, nftables and ip_forward of a platform under test land in the namespace it runs in.
    """
    if os.geteuid() != 0:
        msg = "these tests boot real guests: run them as root, by `sudo make e2e`"
        raise RuntimeError(msg)
    if BOX.exists():
        return
    if _libvirtd_is_here() or run("ip", "route", "show", "default"):
        msg = (
            "these tests change the network of the host they run on, and this is the machine's"
            " own; run `make e2e`, or: tools/in-host-netns .venv/bin/python -m pytest -m e2e"
        )
        raise RuntimeError(msg)


def _libvirtd_is_here() -> bool:
    """Return True if libvirtd, which always has the machine's own network, shares ours."""
    try:
        pid = LIBVIRTD_PID.read_text().strip()
        return os.readlink(f"/proc/{pid}/ns/net") == os.readlink(OWN_NETNS)
    except OSError:
        return False


def run(*argv: str, timeout_s: float = 60, check: bool = True) -> str:
    """Return the output of a command; its errors are in the exception."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    if check and done.returncode != 0:
        msg = f"{' '.join(argv)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        raise AssertionError(msg)
    return done.stdout


def ping(address: str, *, wait_s: float = 30) -> bool:
    """Return True if the address answers within `wait_s`."""
    deadline = time.monotonic() + wait_s
    argv = ["ping", "-n", "-q", "-c", "1", "-W", "1", address]
    while subprocess.run(argv, capture_output=True, check=False).returncode != 0:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)  # "unreachable" is an answer that comes at once
    return True


def take_census(state_dir: Path, run_dir: Path, uids: Collection[str]) -> list[str]:
    """Return the census of this namespace without other platforms on this machine.

    The machine's libvirt, /run/netns, mounts and process table are shared. Of lines with a VM's
    uid only those of `uids` are ours. Of processes only those in our network namespace are ours.
    """
    lines = [line for line in census.take(state_dir, run_dir) if not line.startswith("process ")]
    lines += [f"process {name}" for name in _processes_here()]
    return sorted(line for line in lines if _is_ours(line, uids, state_dir))


def _is_ours(line: str, uids: Collection[str], state_dir: Path) -> bool:
    kind, _, rest = line.partition(" ")
    if kind == "mount" and rest.startswith(PLATFORMS):
        own = len(Path(PLATFORMS).parts)
        return Path(rest).parts[:own] == state_dir.parts[:own]
    if "vb-" in rest:
        return rest.split("vb-", 1)[1][:UID_CHARS] in uids
    if kind == "file" and rest.startswith(str(census.CNI_DIR)):
        return CNI_NETWORK in rest
    return True


def _processes_here() -> Iterator[str]:
    """Return our programs in this network namespace, and QEMUs of VMs, which run in libvirt's."""
    here = os.readlink(OWN_NETNS)
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            argv = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            is_here = os.readlink(folder / "ns/net") == here
        except OSError:
            continue
        runs_a_vm = is_qemu(argv) and any(word.startswith("guest=vb-") for word in argv)
        if runs_a_vm or (is_here and census._is_ours(argv) and not is_qemu(argv)):
            yield census._short(argv)


def is_qemu(argv: Sequence[str]) -> bool:
    """Return True for the emulator of a domain."""
    return bool(argv) and Path(argv[0]).name.startswith("qemu-system-")


def qemu_pids(uid: str) -> list[int]:
    """Return the emulators that run a VM; more than one would violate I1."""
    return emulators().get(uid, [])


def emulators() -> dict[str, list[int]]:
    """Return the emulators of all VMs, by uid."""
    found: dict[str, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                argv = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            guest = next((word for word in argv if word.startswith(GUEST)), "")
            if is_qemu(argv) and guest:
                uid = guest.removeprefix(GUEST)[:UID_CHARS]
                found.setdefault(uid, []).append(int(folder.name))
    return found


def children(pid: int) -> dict[int, list[str]]:
    """Return the living children of a process and their command lines."""
    found = {}
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in listed.read_text().split():
            try:
                argv = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")[:-1]
            except OSError:
                continue
            if argv:  # a zombie has none
                found[int(child)] = argv
    return found


def resolvers(run_dir: Path) -> list[int]:
    """Return the resolvers of a platform: they stay with the names of guests."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            argv = path.read_bytes().decode().split("\0")
            if "virtbus.netd.resolver_process" in argv and f"{run_dir}/netd/" in argv[3]:
                found.append(int(path.parent.name))
    return found


def domains_with_disks_below(folder: Path) -> list[str]:
    """Return the names of libvirt's domains whose definition names a file below `folder`."""
    virsh = ("virsh", "-q", "-c", "qemu:///system")
    names = run(*virsh, "list", "--all", "--name", check=False).split()
    return [n for n in names if f"{folder}/" in run(*virsh, "dumpxml", n, check=False)]
