"""Resumes guests that QEMU paused because their disk was full (F30).

Nothing reports that space is free again, so they are resumed at each comparison. QEMU repeats the
write. If it still fails, the guest pauses again and has lost nothing.
"""

import logging
from collections.abc import Iterable, Mapping

from virtbus.nodeagent.core.ports import DomainFacts, Hypervisor
from virtbus.nodeagent.vm.actor import VmActor
from virtbus.schemas.errors import VirtbusError

log = logging.getLogger(__name__)

NO_ROOM = "its disk's host has no room (or fails): free space there; the guest continues by itself"


async def go_on(
    domains: Iterable[DomainFacts], guests: Mapping[str, VmActor], hypervisor: Hypervisor
) -> None:
    """Report why these guests wait, and resume them."""
    for facts in domains:
        guest = guests.get(facts.uid)
        if guest is None:
            continue
        waits = NO_ROOM if facts.waits_for_disk else ""
        if waits != guest.vm.observed.disk_waits:
            guest.vm.observed.disk_waits = waits
            guest.report()
        if not waits or guest.vm.record.paused:
            continue
        try:
            await hypervisor.resume(facts.uid)
        except VirtbusError as error:
            extra = {"code": "not_resumed", "uid": facts.uid}
            log.info("paused because its disk is full: %s", error, extra=extra)
