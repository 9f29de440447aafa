"""Sends commands to a guest's QEMU by libvirt's monitor. libvirt itself has no calls like these.

libvirt marks such a domain as tainted (`custom-monitor`), which is a line in its log (ADR 0050,
0056).
Only the commands of this module are sent.
"""

import json
import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import libvirt
import libvirt_qemu

from virtbus.nodeagent.core.nics import nic_id
from virtbus.schemas.errors import Code, VirtbusError

_NODE = re.compile(r"libvirt-(\d+)-(format|storage)$")
"""libvirt's names of block nodes; the number is the `index` of a disk's source in its XML."""


def set_link(index: int, *, up: bool) -> Callable[[libvirt.virDomain], None]:
    """Return a function that sets the link of NIC `index` of a domain. The guest sees it at once.

    It raises VirtbusError 500 `qemu_refused` if QEMU has no such NIC.
    """
    arguments = {"name": nic_id(index), "up": up}

    def run(domain: libvirt.virDomain) -> None:
        answer = _answer(domain, "set_link", arguments)
        if error := answer.get("error"):
            message = f"QEMU refused the link of NIC {index}: {error.get('desc')}; see its log"
            raise VirtbusError(Code.INTERNAL, "qemu_refused", message)

    return run


def close_left(domain: libvirt.virDomain) -> None:
    """Close the block nodes that libvirt has made, and that its XML does not name any more.

    libvirt closes a detached disk when QEMU reports the device's end. After a reset of the guest
    the device may still use its node at that moment. QEMU refuses, and libvirt does not repeat it.
    QEMU refuses here too while a device uses a node; the caller checks the file and repeats this.
    """
    found = _answer(domain, "query-named-block-nodes").get("return", [])
    nodes = [one["node-name"] for one in found]
    sources = ElementTree.fromstring(domain.XMLDesc()).iter("source")  # noqa: S314  libvirt's own
    named = {source.get("index") for source in sources}
    for node in sorted(nodes):  # the format before the file below it
        made = _NODE.match(node)
        if made and made[1] not in named:
            _answer(domain, "blockdev-del", {"node-name": node})


def used_files(domain: libvirt.virDomain) -> dict[str, int]:
    """Return the files that the guest's devices use, each with the size that the guest sees.

    This is QEMU's own answer, also after libvirt has lost count.
    """
    found = {}
    for device in _answer(domain, "query-block").get("return", []):
        inserted = device.get("inserted")
        if inserted is not None:
            found[_file_of(inserted["file"])] = int(inserted["image"]["virtual-size"])
    return found


def _file_of(name: str) -> str:
    """Return the path in QEMU's name of a node: the path, or options in JSON."""
    node: Any = json.loads(name.removeprefix("json:")) if name.startswith("json:") else name
    while isinstance(node, dict):
        node = node.get("filename") or node.get("file") or ""
    return str(node)


def _answer(
    domain: libvirt.virDomain, command: str, arguments: dict[str, Any] | None = None
) -> dict[str, Any]:
    text = json.dumps({"execute": command, "arguments": arguments or {}})
    answer: dict[str, Any] = json.loads(libvirt_qemu.qemuMonitorCommand(domain, text, 0))
    return answer
