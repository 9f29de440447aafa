"""Devices by which a guest that failed says so: pvpanic, and the watchdog that it asked for."""

from virtbus.nodeagent.core.element import Element, el
from virtbus.nodeagent.core.slots import Slots
from virtbus.schemas.watchdog import Watchdog


def guards(watchdog: Watchdog | None, slots: Slots) -> list[Element]:
    """Pvpanic takes an I/O port and no slot; a guest without its driver does not notice it."""
    panic = el("panic", model="isa")
    if watchdog is None:
        return [panic]
    action = watchdog.i6300esb.action
    return [panic, el("watchdog", slots.address(), model="i6300esb", action=action)]
