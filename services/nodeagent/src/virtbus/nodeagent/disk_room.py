"""Guests whose disk had no room: QEMU pauses them at the write; with some they go on (F30).

Nothing tells that there is room again, so they are resumed at each comparison: QEMU repeats the
write, and where it still does not fit the guest pauses anew and has lost nothing.
"""

import logging
from collections.abc import Iterable, Mapping

from virtbus.nodeagent.core.ports import DomainFacts, Hypervisor
from virtbus.nodeagent.guest import Guest
from virtbus.schemas.errors import VirtbusError

log = logging.getLogger(__name__)

NO_ROOM = "its disk's host has no room (or fails): free space there; the guest goes on by itself"


async def go_on(
    domains: Iterable[DomainFacts], guests: Mapping[str, Guest], hypervisor: Hypervisor
) -> None:
    """Say why the guests that wait for room do, and let them try again."""
    for facts in domains:
        guest = guests.get(facts.uid)
        if guest is None:
            continue
        waits = NO_ROOM if facts.waits_for_disk else ""
        if waits != guest.seen.disk_waits:
            guest.seen.disk_waits = waits
            guest.report()
        if not waits or guest.record.paused:
            continue
        try:
            await hypervisor.resume(facts.uid)
        except VirtbusError as error:
            extra = {"code": "not_resumed", "uid": facts.uid}
            log.info("waits for its disk: %s", error, extra=extra)
