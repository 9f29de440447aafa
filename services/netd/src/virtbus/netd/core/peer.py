"""Proof that a process that requests tap descriptors is the emulator of a domain."""

import itertools
import re
from collections.abc import Iterator

_UUID_FLAG = b"-uuid"
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})")
_MACHINE = re.compile(r"^(?:machine-)?qemu-\d+-(?P<name>.+?)(?:\.scope|\.libvirt-qemu)?$")
_MACHINE_NAME_MAX = 64


def asks_for(cmdline: bytes, uid: str) -> bool:
    """Return True if `/proc/<pid>/cmdline` contains `-uuid <uid>`."""
    arguments = cmdline.split(b"\0")
    return (_UUID_FLAG, uid.encode()) in itertools.pairwise(arguments)


def in_domain_cgroup(cgroups: str, domain: str) -> bool:
    r"""Return True if `/proc/<pid>/cgroup` names libvirt's machine of `domain` in any hierarchy.

    libvirt calls the cgroup of a domain its machine. Forms: `/machine/qemu-3-web.libvirt-qemu/…`
    (cgroupfs) and `/machine.slice/machine-qemu\x2d3\x2dweb.scope/…` (systemd). libvirt omits
    characters that a hostname may not have, and cuts the machine's name at 64 characters.
    """
    wanted = machine_suffix(domain)
    return any(_same(name, wanted, plain) for name, plain in _machines(cgroups))


def machine_of(cgroups: str) -> str:
    """Return libvirt's machine in the cgroups of a process; empty without a machine.

    An emulator cannot leave its machine.
    """
    return next((plain for _name, plain in _machines(cgroups)), "")


def _machines(cgroups: str) -> Iterator[tuple[str, str]]:
    """Yield, for each machine in the cgroups, the domain's name in it and the machine's name."""
    for line in cgroups.splitlines():
        for part in line.split(":", 2)[-1].split("/"):
            plain = _ESCAPE.sub(lambda match: chr(int(match.group(1), 16)), part)
            match = _MACHINE.match(plain)
            if match:
                yield match.group("name"), plain


def machine_suffix(domain: str) -> str:
    """Return the form that a domain's name has in the name of its machine.

    As libvirt's `virDomainMachineNameAppendValid`, this function keeps only hostname characters. Of
    a run of '-' and '.', it keeps the first character.
    """
    single = re.sub(r"([.-])[.-]+", r"\1", domain)
    return re.sub(r"[^A-Za-z0-9.-]", "", single).strip(".-")


def _same(shown: str, wanted: str, part: str) -> bool:
    machine = part.removeprefix("machine-").removesuffix(".scope").removesuffix(".libvirt-qemu")
    cut = len(machine) >= _MACHINE_NAME_MAX - 1
    return bool(wanted) and (shown == wanted or (cut and wanted.startswith(shown)))
