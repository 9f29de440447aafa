"""Renders files, environment, mounts and links as lists for a cloud-config (ADR 0043)."""

import base64
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from virtbus.schemas.guest_files import GuestFile, GuestLink, GuestMount, HostAlias
from virtbus.schemas.seed import CloudInit
from virtbus.schemas.vm import Devices, Disk, DiskBus

ENVIRONMENT = "/etc/cloud/environment"
_MOUNT = (
    'mkdir -p "$1"; mountpoint -q "$1" || mount -t virtiofs -o "$3" "$2" "$1" || '
    'echo "$4" >/dev/console'
)
_SELF = "127.0.1.1"
"""The address of a host's own name in Debian and cloud-init."""
_BEGIN, _END = "# begin of the host aliases of virtbus", "# end of the host aliases of virtbus"
_ALIASES = (
    "[ -e /etc/hosts ] || : >/etc/hosts; "
    "for file in /etc/hosts /etc/cloud/templates/hosts.*.tmpl; do "
    '[ -f "$file" ] && [ ! -L "$file" ] || continue; cp -a "$file" "$file.virtbus" && '
    '{ sed "/^$2$/,/^$3$/d" "$file"; printf "%s\\n" "$2" "$1" "$3"; } >"$file.virtbus" && '
    'mv "$file.virtbus" "$file"; done'
)
"""A script that replaces virtbus' lines in /etc/hosts and in cloud-init's templates of /etc/hosts.
"""
_PLAIN = re.compile(r"[A-Za-z0-9_@%+:,./-]*")
_SPECIAL = re.compile(r'(["\\$`])')
_LINKS = {
    (DiskBus.VIRTIO, "disk"): "virtio-{}",
    (DiskBus.SATA, "disk"): "ata-QEMU_HARDDISK_{}",
    (DiskBus.SATA, "cdrom"): "ata-QEMU_DVD-ROM_{}",
    (DiskBus.SCSI, "disk"): "scsi-0QEMU_QEMU_HARDDISK_{}",
    (DiskBus.SCSI, "cdrom"): "scsi-0QEMU_QEMU_CD-ROM_{}",
    (DiskBus.USB, "disk"): "usb-QEMU_QEMU_HARDDISK_{}-0:0",
    (DiskBus.NVME, "disk"): "nvme-QEMU_NVMe_Ctrl_{}",
}
"""udev's names of a disk below /dev/disk/by-id, for a serial; measured in Debian 12."""


def cloud_config_lists(seed: CloudInit, devices: Devices) -> dict[str, list[Any]]:
    """Return the lists that virtbus appends to the user's cloud-config.

    `fs_setup` is for empty disks; `bootcmd` is for host aliases, links and shared directories.
    """
    files = [_file(one) for one in seed.write_files]
    if seed.environment:
        text = environment_file(seed.environment)
        files.append(_file(GuestFile(path=ENVIRONMENT, content=text)))
    found = {disk.name: disk for disk in devices.disks}
    tags = frozenset(one.name for one in devices.filesystems)
    lists: dict[str, list[Any]] = {
        "write_files": files,
        "fs_setup": list(_file_systems(seed.mounts, found)),
        "mounts": list(_mounts(seed.mounts, found)),
        "bootcmd": [
            *_host_aliases((*_own_names(seed), *seed.host_aliases)),
            *_links(seed.links, found),
            *_directories(seed.mounts, tags),
        ],
    }
    return {name: values for name, values in lists.items() if values}


def environment_file(values: Mapping[str, str]) -> str:
    """Return lines of KEY=value that a shell and systemd's EnvironmentFile read equally.

    Double quotes enclose all values other than simple words. In double quotes, a shell and systemd
    know the same four escapes.
    """
    return "".join(f"{name}={_quoted(value)}\n" for name, value in values.items())


def _quoted(value: str) -> str:
    if _PLAIN.fullmatch(value):
        return value
    return '"' + _SPECIAL.sub(r"\\\1", value) + '"'


def _file(file: GuestFile) -> dict[str, Any]:
    """Base64 keeps cloud-init from changing the content."""
    entry: dict[str, Any] = {
        "path": file.path,
        "encoding": "b64",
        "content": base64.b64encode(file.data).decode(),
        "permissions": file.mode.zfill(4),
        "owner": file.owner,
    }
    if file.owner.partition(":")[0] != "root":
        entry["defer"] = True  # until after the creation of users
    return entry


def _mounts(mounts: Sequence[GuestMount], disks: Mapping[str, Disk]) -> Iterator[list[str]]:
    for mount in mounts:
        disk = disks.get(mount.volume)
        if disk is None:
            continue  # a shared directory, or an update has removed the disk
        # cloud-init itself adds the partition's number, and ignores a device named …-part1
        device = device_path(disk) + (f".{mount.partition}" if mount.partition else "")
        yield [device, mount.path, mount.filesystem, mount.options, "0", "0"]


def _directories(mounts: Sequence[GuestMount], tags: Collection[str]) -> Iterator[list[str]]:
    """Yield the commands that mount shared directories at each boot.

    cloud-init ignores tags in its list `mounts`, because a tag is no block device (tested with
    22.4). A failure only prints a line on the console, so that a guest without the kernel module
    still boots.
    """
    for mount in mounts:
        if mount.volume not in tags:
            continue
        options = ",".join(one for one in mount.options.split(",") if one != "nofail")
        text = (
            f"virtbus: {mount.path} is not mounted (virtiofs, tag {mount.volume}): the guest needs "
            "the kernel module virtiofs"
        )
        yield ["sh", "-c", _MOUNT, "sh", mount.path, mount.volume, options or "defaults", text]


def _file_systems(
    mounts: Sequence[GuestMount], disks: Mapping[str, Disk]
) -> Iterator[dict[str, Any]]:
    """Yield an entry of `fs_setup` for each disk that needs a file system.

    With the partition `any`, cloud-init keeps an existing file system of the same type.
    """
    made = {mount.volume: mount.filesystem for mount in mounts if mount.make_filesystem}
    for name, filesystem in made.items():
        if name in disks:
            device = device_path(disks[name])
            yield {"device": device, "filesystem": filesystem, "partition": "any"}


def _own_names(seed: CloudInit) -> Iterator[HostAlias]:
    if seed.fqdn:
        names = dict.fromkeys((seed.fqdn, seed.fqdn.partition(".")[0]))
        yield HostAlias(ip=_SELF, hostnames=tuple(names))


def _host_aliases(aliases: Sequence[HostAlias]) -> Iterator[list[str]]:
    """Yield the command that writes the aliases into /etc/hosts at each boot.

    The command also changes cloud-init's template, because `manage_etc_hosts` later replaces
    /etc/hosts by the template.
    """
    if aliases:
        lines = "\n".join("\t".join((one.ip, *one.hostnames)) for one in aliases)
        yield ["sh", "-c", _ALIASES, "sh", lines, _BEGIN, _END]


def _links(links: Sequence[GuestLink], disks: Mapping[str, Disk]) -> Iterator[list[str]]:
    for link in links:
        if link.volume in disks:
            yield ["mkdir", "-p", str(PurePosixPath(link.path).parent)]
            yield ["ln", "-sfn", device_path(disks[link.volume]), link.path]


def device_path(disk: Disk) -> str:
    """Return the path of a disk in its guest."""
    return "/dev/disk/by-id/" + _link(disk)


def udev_serial(disk: Disk) -> str:
    """Return the disk's serial in the guest's udev, which may include the disk's model.

    The disk's link in /dev/disk/by-id is named `<bus>-<this serial>`.
    """
    return _link(disk).partition("-")[2]


def _link(disk: Disk) -> str:
    # a CD-ROM on virtio becomes a disk
    kind = "disk" if disk.bus is DiskBus.VIRTIO else disk.device
    return _LINKS[disk.bus, kind].format(disk.guest_serial)
