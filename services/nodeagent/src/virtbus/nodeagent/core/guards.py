"""Renders devices that report a failed guest: pvpanic, and the optional watchdog."""

from virtbus.nodeagent.core.element import Element, el
from virtbus.nodeagent.core.slots import Slots
from virtbus.schemas.watchdog import Watchdog


def guards(watchdog: Watchdog | None, slots: Slots) -> list[Element]:
    """Return the devices.

    Pvpanic uses an I/O port and no slot; guests without a driver ignore it.
    """
    panic = el("panic", model="isa")
    if watchdog is None:
        return [panic]
    action = watchdog.i6300esb.action
    return [panic, el("watchdog", slots.address(), model="i6300esb", action=action)]
