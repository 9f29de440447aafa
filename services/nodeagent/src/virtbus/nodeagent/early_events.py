"""Buffers ready events of VMs until this agent has read their records."""

import asyncio
from collections import deque
from collections.abc import Sequence

from virtbus.schemas.ids import check_uid
from virtbus.schemas.node_rpc import ImageReady, NetReady
from virtbus.schemas.wire import encode

Part = ImageReady | NetReady

PARTS_A_UID = 4
"""The limit of events per VM: disks, a begun network, a ready network, and a spare event."""
UIDS = 1000
PART_BYTES = 16 * 1024
"""The limit of an event. The actor later requests the data of a larger event itself."""
KEPT_S = 60.0
"""Lifetime of an event. A VM's record arrives sooner, or the VM is gone."""


class EarlyEvents:
    """A buffer with limits per VM, in total and in time. It drops the oldest events."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[float, deque[Part]]] = {}

    def add(self, part: Part) -> None:
        """Store a ready event, or drop a too large event.

        Raises:
            ValueError: the event's uid is invalid.
        """
        uid = check_uid(part.uid)
        if len(encode(part)) > PART_BYTES:
            return
        now_s = asyncio.get_running_loop().time()
        _, parts = self._parts.pop(uid, (0.0, deque[Part](maxlen=PARTS_A_UID)))
        parts.append(part)
        self._parts[uid] = (now_s, parts)  # the last entry is the newest
        for old, (told_s, _) in list(self._parts.items()):
            if len(self._parts) <= UIDS and told_s >= now_s - KEPT_S:
                break
            del self._parts[old]

    def take(self, uid: str) -> Sequence[Part]:
        """Return and remove the ready events of a VM, oldest first."""
        return tuple(self._parts.pop(uid, (0.0, ()))[1])
