"""Sends commands to a guest's QEMU by libvirt's monitor, about devices that libvirt does not know.

libvirt marks such a domain as tainted (`custom-monitor`), which is a line in its log (ADR 0050).
Only the constant commands of this module are sent.
"""

import json
from collections.abc import Callable

import libvirt
import libvirt_qemu

from virtbus.nodeagent.core.nics import nic_id
from virtbus.schemas.errors import Code, VirtbusError


def set_link(index: int, *, up: bool) -> Callable[[libvirt.virDomain], None]:
    """Return a function that sets the link of NIC `index` of a domain. The guest sees it at once.

    It raises VirtbusError 500 `qemu_refused` if QEMU has no such NIC.
    """
    arguments = {"name": nic_id(index), "up": up}
    command = json.dumps({"execute": "set_link", "arguments": arguments})

    def run(domain: libvirt.virDomain) -> None:
        answer = json.loads(libvirt_qemu.qemuMonitorCommand(domain, command, 0))
        if error := answer.get("error"):
            message = f"QEMU refused the link of NIC {index}: {error.get('desc')}; see its log"
            raise VirtbusError(Code.INTERNAL, "qemu_refused", message)

    return run
