"""Finds the kinds of a pod's paths on the node, and reads the files of its small volumes.

The guest gets these files at its first boot. In such a volume, each file is a link into `..data`,
and `..data` is a link to a folder with the time of kubelet's last update in its name. Names that
begin with `..` are skipped, so each file is read once. A link that leads out of its volume is
refused.
"""

import base64
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from virtbus.bus.runtime.pool_settings import RbdPool, load_pools
from virtbus.cri.core.configs import ContainerConfig, Mount
from virtbus.cri.core.pod_dns import Hosts, of_file
from virtbus.cri.core.pod_volumes import CEPH, FLEXVOLUME, RAW, kind
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest_files import GuestFile
from virtbus.schemas.seed import FILES, HOST_ALIAS_CHARACTERS_MAX
from virtbus.schemas.wire import decode, reason_of

MOST_BYTES = 256 * 1024
"""Maximum bytes of all files of a pod together. The VM's secret contains the files in base64."""


OPTIONS, OPTIONS_BYTES = "virtlet-flexvolume.json", 64 * 1024
"""The driver's file with a flexvolume's options, as in Virtlet, and the file's maximum size."""
MOUNTS = Path("/proc/self/mountinfo")
_DEVICES = Path("/dev")
_LOOPS = Path("/sys/block")
_IN_MEMORY = frozenset({"tmpfs", "hugetlbfs"})


class Offered(NamedTuple):
    """The node's offer to flexvolumes: patterns of permitted devices, and the pools' file."""

    devices: Sequence[str] = ()
    pools_file: Path | None = None


def inspected(config: ContainerConfig, namespace: str, offered: Offered) -> ContainerConfig:
    """Return the configuration, with the kinds of its paths on the node filled in.

    Raises:
        OSError: the table of mounts cannot be read.
        VirtbusError: 400: the pools' file is invalid.
    """
    memory = in_memory(MOUNTS.read_text(encoding="utf-8", errors="replace"))
    mounts = tuple(_inspected(one, memory, namespace, offered) for one in config.mounts)
    devices = tuple(
        one.model_copy(
            update={"block_path": _block_device(one.host_path) or _loop_device(one.host_path)}
        )
        for one in config.devices
    )
    return config.model_copy(update={"mounts": mounts, "devices": devices})


def _inspected(mount: Mount, memory: frozenset[str], namespace: str, offered: Offered) -> Mount:
    path, options = Path(mount.host_path), None
    if kind(mount) == FLEXVOLUME:  # in other volumes, a guest or pod may have written the file
        options = _options(path)
    named = options.get("path", "") if options and options.get("type") == RAW else ""
    device = _block_device(named)
    return mount.model_copy(
        update={
            "is_file": path.is_file(),
            "is_folder": path.is_dir(),
            "memory": mount.host_path.rstrip("/") in memory,
            "options": options,
            "block_path": device,
            "permitted": bool(device) and _is_permitted(device, offered.devices),
            "assigned": _assigned(options or {}, namespace, offered.pools_file),
        }
    )


def _assigned(
    options: Mapping[str, str], namespace: str, pools_file: Path | None
) -> tuple[str, str] | None:
    """Return the pool and the name of the volume that stands for a flexvolume's Ceph image.

    In the pools' file, the node's operator assigns each image to a volume of one namespace. Return
    None if the image is not assigned to the pod's namespace. Ceph gets the login of the pool.
    """
    if options.get("type") != CEPH or pools_file is None:
        return None
    hosts = _hosts(options.get("monitor", ""))
    image = f"{options.get('pool', '')}/{options.get('volume', '')}"
    for name, pool in load_pools(pools_file).items():
        if isinstance(pool, RbdPool) and not hosts.isdisjoint(pool.monitors):
            for key, place in pool.volumes.items():
                home, _, volume = key.partition(".")
                if place == image and home == namespace:
                    return name, volume
    return None


def _hosts(monitors: str) -> frozenset[str]:
    """Return the hosts of a list such as `192.0.2.1:6789,[2001:db8::1]:6789`; ports are optional.

    An entry with several colons and without brackets is an IPv6 address without a port.
    """
    found = set()
    for one in monitors.split(","):
        host, bracket, _ = one.strip().partition("]")
        if not bracket and host.count(":") == 1:
            host = host.partition(":")[0]
        found.add(host.removeprefix("["))
    return frozenset(found)


def _is_permitted(device: str, patterns: Sequence[str]) -> bool:
    """Return True if a pattern matches the real path `device`, or a link that leads to it."""
    found = (one for each in patterns for one in _DEVICES.glob(each.removeprefix("/dev/")))
    return any(os.path.realpath(one) == device for one in found)


def _block_device(path: str) -> str:
    """Return the real path of a block device; empty for any other path."""
    try:
        real = Path(path).resolve(strict=True)
        return str(real) if path and stat.S_ISBLK(real.stat().st_mode) else ""
    except (OSError, ValueError, RuntimeError):
        return ""


def _loop_device(path: str) -> str:
    """Return the loop device of a file; empty if the file has no loop device.

    If a local PersistentVolume is a file, kubelet attaches a loop device to the file. Kubelet's
    request names only the file.
    """
    for backing in sorted(_LOOPS.glob("loop*/loop/backing_file")):
        with suppress(OSError, ValueError):
            if Path(backing.read_text(encoding="utf-8").removesuffix("\n")).samefile(path):
                return str(_DEVICES / backing.parts[-3])
    return ""


def in_memory(table: str) -> frozenset[str]:
    """Return the mount points of file systems in memory. `table` is a mountinfo (proc(5))."""
    found = set()
    for line in table.splitlines():
        words, _, more = line.partition(" - ")
        if more.partition(" ")[0] in _IN_MEMORY and len(words.split(" ")) > _POINT:
            found.add(words.split(" ")[_POINT].replace("\\040", " "))
    return frozenset(found)


_POINT = 4
"""The column of the mount point."""


def _options(folder: Path) -> dict[str, str] | None:
    try:
        content, _ = _read(folder / OPTIONS, OPTIONS_BYTES)
        value = decode(content, OPTIONS_BYTES)
    except (OSError, ValueError, VirtbusError):
        return None
    if not isinstance(value, dict):
        return None
    # `secret` is a login for Ceph. It is dropped, because the node's pool has its own login.
    return {str(key): str(one) for key, one in value.items() if key != "secret"}


def read_files(mounts: Iterable[Mount]) -> tuple[GuestFile, ...]:
    """Return the files of these mounts at their paths in the guest.

    Raises:
        VirtbusError: 400 `volume_too_large`, `volume_unreadable`.
    """
    found: list[GuestFile] = []
    left = MOST_BYTES
    for mount in mounts:
        try:
            for path, name in _files(Path(mount.host_path)):
                content, mode = _read(path, left)
                left -= len(content)
                target = f"{mount.container_path.rstrip('/')}/{name}".rstrip("/")
                text = base64.b64encode(content).decode()
                found.append(GuestFile(path=target, content_base64=text, mode=f"{mode:04o}"))
                _check(len(found), left)
        except (OSError, ValueError) as error:
            raise _unreadable(mount, str(error)) from error
    return tuple(found)


def read_hosts(mounts: Iterable[Mount]) -> Hosts:
    """Return the contents of kubelet's file for /etc/hosts; empty without a mount.

    Raises:
        VirtbusError: 400 `volume_unreadable`.
    """
    for mount in mounts:
        try:
            content, _ = _read(Path(mount.host_path), HOST_ALIAS_CHARACTERS_MAX)
            return of_file(content)
        except OSError as error:
            raise _unreadable(mount, str(error)) from error
        except ValueError as error:
            raise _unreadable(mount, reason_of(error)) from error
    return Hosts()


def _unreadable(mount: Mount, why: str) -> VirtbusError:
    message = f"the volume at {mount.container_path} cannot be read: {why}"
    return VirtbusError(Code.INVALID, "volume_unreadable", message)


def _check(count: int, left: int) -> None:
    if left < 0 or count > FILES:
        message = (
            "the ConfigMaps, Secrets and projected volumes of the pod have more than "
            f"{FILES} files or {MOST_BYTES // 1024} KiB; give the guest less, or a disk"
        )
        raise VirtbusError(Code.INVALID, "volume_too_large", message)


def _files(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of a volume with their paths in the volume. A single file has no path."""
    if root.is_file():
        yield root, ""
        return
    home = root.resolve(strict=True)
    for folder, folders, names in os.walk(home, followlinks=False):
        here = Path(folder)
        links = [name for name in folders if (here / name).is_symlink()]
        folders[:] = sorted(name for name in folders if name not in links and name[:2] != "..")
        for name in sorted(names):
            if name[:2] != "..":
                yield _inside(here / name, home), str((here / name).relative_to(home))
        for name in sorted(links):  # kubelet makes links for the folders of a volume, too
            if name[:2] == "..":
                continue
            inner = _inside(here / name, home)
            for path, below in _files(inner):
                yield path, str((here / name / below).relative_to(home))


def _inside(path: Path, home: Path) -> Path:
    """Return the target of a link; raise ValueError if the target is not below `home`."""
    real = path.resolve(strict=True)
    if not real.is_relative_to(home):
        msg = f"{path.name} leads out of the volume"
        raise ValueError(msg)
    return real


def _read(path: Path, left: int) -> tuple[bytes, int]:
    """Return up to `left` + 1 bytes of a regular file, and the file's mode."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            msg = f"{path.name} is no file"
            raise ValueError(msg)
        return file.read(left + 1), stat.S_IMODE(mode) & 0o777
