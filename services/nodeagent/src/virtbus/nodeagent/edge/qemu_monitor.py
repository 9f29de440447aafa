"""Sends commands to a guest's QEMU by libvirt's monitor, about devices that libvirt does not know.

libvirt marks such a domain as tainted (`custom-monitor`), which is a line in its log (ADR 0050).
Only the constant commands of this module are sent.
"""

import json
from collections.abc import Callable
from typing import Any

import libvirt
import libvirt_qemu

from virtbus.nodeagent.core.nics import netdev_id, nic_id
from virtbus.schemas.errors import Code, VirtbusError

_DEVICES = "/machine/peripheral"
"""The devices with an id, in QEMU's object model."""
_GONE = "DeviceNotFound"
_PENDING = "in the process of unplug"


def set_link(device: str, *, up: bool) -> Callable[[libvirt.virDomain], None]:
    """Return a function that sets the link of a NIC of a domain. The guest sees it at once.

    It raises VirtbusError 500 `qemu_refused` if QEMU has no such NIC.
    """

    def run(domain: libvirt.virDomain) -> None:
        answer = _execute(domain, "set_link", name=device, up=up)
        if error := answer.get("error"):
            raise _refused(f"the link of {device}", error)

    return run


def ask_to_release(number: int) -> Callable[[libvirt.virDomain], None]:
    """Return a function that asks the guest to release NIC `number` of its start.

    It raises VirtbusError 500 `qemu_refused`. A NIC that is gone or pending is no error.
    """

    def run(domain: libvirt.virDomain) -> None:
        error = _execute(domain, "device_del", id=nic_id(number)).get("error")
        if error and error.get("class") != _GONE and _PENDING not in str(error.get("desc")):
            raise _refused(f"to unplug NIC {number}", error)

    return run


def has_nic(number: int) -> Callable[[libvirt.virDomain], bool]:
    """Return a function that returns True while the guest has NIC `number` of its start.

    Once the guest has released it, QEMU closes the NIC's tap, also if that was done before.
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
