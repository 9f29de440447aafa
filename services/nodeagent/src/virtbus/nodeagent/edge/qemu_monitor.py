"""Sends commands through libvirt to a guest's QEMU, for effects that libvirt has no calls for.

libvirt marks such a domain as tainted (`custom-monitor`), which is a line in its log (ADR 0050,
0056, 0057, 0080). virtbus sends only the commands of this module.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from xml.etree import ElementTree

import libvirt
import libvirt_qemu

from virtbus.nodeagent.core.disks import volume_alias
from virtbus.nodeagent.core.guest_backups import Bitmap
from virtbus.nodeagent.core.nics import netdev_id, nic_id
from virtbus.schemas.errors import Code, VirtbusError

_NODE = re.compile(r"libvirt-(\d+)-(format|storage)$")
"""libvirt's names of block nodes; the number is the `index` of a disk's source in its XML."""
_VOLUME = re.compile(rf"{re.escape(volume_alias(''))}[^/]+")
_DEVICES = "/machine/peripheral"
"""The path of the devices that have an id, in QEMU's object model."""
_END_S = 10.0
_GONE = "DeviceNotFound"
_PENDING = "in the process of unplug"


def set_link(device: str, *, up: bool) -> Callable[[libvirt.virDomain], None]:
    """Return a function that sets the link of a domain's NIC. The guest sees the change at once.

    The function raises VirtbusError 500 `qemu_refused` if QEMU has no such NIC.
    """

    def run(domain: libvirt.virDomain) -> None:
        answer = _execute(domain, "set_link", name=device, up=up)
        if error := answer.get("error"):
            raise _refused(f"the link of {device}", error)

    return run


def close_left(domain: libvirt.virDomain) -> None:
    """Close the block nodes that libvirt made, and that the domain's XML no longer names.

    libvirt closes a detached disk when QEMU reports the device's end. After a reset of the guest,
    the device may still use its node at that moment. QEMU then refuses to close the node, and
    libvirt does not try again. QEMU may refuse this function, too. So the caller checks that the
    file is closed, and otherwise calls again.

    If libvirtd is killed in an attach, QEMU may have the device, and libvirt does not know it. Such
    a device of a volume is removed first. Otherwise it would keep the lock of the volume's file.
    """
    found = _execute(domain, "query-named-block-nodes").get("return", [])
    nodes = [one["node-name"] for one in found]
    sources = ElementTree.fromstring(domain.XMLDesc()).iter("source")  # noqa: S314  libvirt's own
    named = {source.get("index") for source in sources}
    left = {node for node in nodes if (made := _NODE.match(node)) and made[1] not in named}
    for device in _execute(domain, "query-block").get("return", []):
        alias = _VOLUME.search(device.get("qdev") or "")
        if alias and device.get("inserted", {}).get("node-name") in left:
            _execute(domain, "device_del", id=alias[0])
    for node in sorted(left):  # a format's node before the node of its file
        _execute(domain, "blockdev-del", **{"node-name": node})


class UsedFile(NamedTuple):
    """A file that a device of a guest uses."""

    size_bytes: int
    """The size that the guest sees."""
    below: tuple[str, ...]
    """The paths of the files below this file, from the top."""


def used_files(domain: libvirt.virDomain) -> dict[str, UsedFile]:
    """Return the files that the guest's devices use, by path.

    QEMU itself gives the answer, so it is right even where libvirt's XML is wrong.
    """
    found = {}
    for device in _execute(domain, "query-block").get("return", []):
        inserted = device.get("inserted")
        if inserted is not None:
            image = inserted["image"]
            used = UsedFile(int(image["virtual-size"]), tuple(_below(image)))
            found[_file_of(inserted["file"])] = used
    return found


def _below(image: dict[str, Any]) -> Iterator[str]:
    while image := image.get("backing-image", {}):
        yield _file_of(image["filename"])


def bitmaps(domain: libvirt.virDomain) -> dict[str, tuple[Bitmap, ...]]:
    """Return the dirty bitmaps of each device of the guest, by the path of the device's file."""
    found = {}
    for device in _execute(domain, "query-block").get("return", []):
        inserted = device.get("inserted")
        if inserted is not None:
            of_disk = inserted.get("dirty-bitmaps", ())
            made = (Bitmap(one["name"], _usable(one)) for one in of_disk if "name" in one)
            found[_file_of(inserted["file"])] = tuple(made)
    return found


def _usable(bitmap: dict[str, Any]) -> bool:
    whole = not bitmap.get("inconsistent", False)
    return whole and bitmap.get("persistent", False) and bitmap.get("recording", False)


def remove_bitmaps(domain: libvirt.virDomain, goes: Callable[[str], bool]) -> None:
    """Remove the bitmaps of the guest's devices whose names `goes` selects.

    Bitmaps in the layers below stay, because layers never change. Raises VirtbusError 500
    `qemu_refused`.
    """
    for device in _execute(domain, "query-block").get("return", []):
        inserted = device.get("inserted") or {}
        for one in inserted.get("dirty-bitmaps", ()):
            if goes(one.get("name", "")):
                of_disk = {"node": inserted["node-name"], "name": one["name"]}
                error = _execute(domain, "block-dirty-bitmap-remove", **of_disk).get("error")
                if error:
                    raise _refused(f"to remove the bitmap {one['name']}", error)


_COPY = "virtbus-copy-"
"""The id of each job of `begin_copy` begins with this. The rest is the disk's target."""


class Copy(NamedTuple):
    """A job that copies the files below a disk into the disk: bytes done, bytes in all."""

    done_bytes: int
    total_bytes: int
    whole: bool
    """True if everything is copied. The job then waits for `end_copy`."""


def begin_copy(domain: libvirt.virDomain, target: str, disk: str, base: str) -> None:
    """Begin to copy the files below a disk into the disk, down to `base` but without it.

    An empty `base` means all files. `disk` and `base` are indexes of libvirt's sources. A complete
    copy waits for `end_copy`, and the disk then still rests on the same files. Raises VirtbusError
    500 `qemu_refused`.
    """
    job: dict[str, str | bool] = {"job-id": _COPY + target, "auto-finalize": False}
    job["device"] = f"libvirt-{disk}-format"
    if base:
        job["base-node"] = f"libvirt-{base}-format"
    if error := _execute(domain, "block-stream", **job).get("error"):
        raise _refused(f"to merge the layers of {target}", error)


def copies(domain: libvirt.virDomain) -> dict[str, Copy]:
    """Return the copies of `begin_copy`, by target."""
    found = {}
    for job in _execute(domain, "query-block-jobs").get("return", []):
        name = str(job["device"])
        if name.startswith(_COPY):
            whole = job.get("status") == "pending"
            found[name.removeprefix(_COPY)] = Copy(int(job["offset"]), int(job["len"]), whole)
    return found


def end_copy(domain: libvirt.virDomain, target: str) -> None:
    """End a copy. The disk keeps the copied data, and still rests on the files below it.

    Raises VirtbusError 503 `domain_busy` if the copy does not end within 10 s.
    """
    _execute(domain, "block-job-cancel", device=_COPY + target)
    limit_s = time.monotonic() + _END_S
    while target in copies(domain):
        if time.monotonic() > limit_s:
            message = f"QEMU does not end the copy of {target}; the agent asks again"
            raise VirtbusError(Code.UNAVAILABLE, "domain_busy", message)
        time.sleep(0.01)


def flush(domain: libvirt.virDomain, disk: str) -> None:
    """Write the tables of a disk to its file. `disk` is the index of libvirt's source.

    QEMU does not report a failed write here. QEMU then keeps the tables in memory, and the guest's
    next flush fails. Raises VirtbusError 500 `qemu_refused`.
    """
    command = {"command-line": f"qemu-io libvirt-{disk}-format flush"}
    if error := _execute(domain, "human-monitor-command", **command).get("error"):
        raise _refused("to flush a disk", error)


def _file_of(name: str) -> str:
    """Return the path in QEMU's name of a file. The name is the path, or options in JSON."""
    node: Any = json.loads(name.removeprefix("json:")) if name.startswith("json:") else name
    while isinstance(node, dict):
        node = node.get("filename") or node.get("file") or ""
    return str(node)


def ask_to_release(number: int) -> Callable[[libvirt.virDomain], None]:
    """Return a function that asks the guest to release a NIC that the guest was started with.

    The function raises VirtbusError 500 `qemu_refused`, but not if the NIC is gone already, or the
    guest has already been asked.
    """

    def run(domain: libvirt.virDomain) -> None:
        error = _execute(domain, "device_del", id=nic_id(number)).get("error")
        if error and error.get("class") != _GONE and _PENDING not in str(error.get("desc")):
            raise _refused(f"to unplug NIC {number}", error)

    return run


def has_nic(number: int) -> Callable[[libvirt.virDomain], bool]:
    """Return a function that returns True while the guest has a NIC that it was started with.

    Once the guest has released the NIC, the function lets QEMU close the NIC's tap, if it is open.
    The function raises VirtbusError 500 `qemu_refused`.
    """

    def run(domain: libvirt.virDomain) -> bool:
        answer = _execute(domain, "qom-list", path=_DEVICES)
        if error := answer.get("error"):
            raise _refused("the list of devices", error)
        if any(one.get("name") == nic_id(number) for one in answer.get("return", ())):
            return True
        _execute(domain, "netdev_del", id=netdev_id(number))
        return False

    return run


def _execute(domain: libvirt.virDomain, command: str, **arguments: str | bool) -> dict[str, Any]:
    text = json.dumps({"execute": command, "arguments": arguments})
    answer: dict[str, Any] = json.loads(libvirt_qemu.qemuMonitorCommand(domain, text, 0))
    return answer


def _refused(what: str, error: dict[str, Any]) -> VirtbusError:
    message = f"QEMU refused {what}: {error.get('desc')}; see its log"
    return VirtbusError(Code.INTERNAL, "qemu_refused", message)
