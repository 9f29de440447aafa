"""Buffers ready events of VMs whose record this agent has not read yet."""

import asyncio
from collections import deque
from collections.abc import Sequence

from virtbus.schemas.ids import check_uid
from virtbus.schemas.node_rpc import ImageReady, NetReady
from virtbus.schemas.wire import encode

Part = ImageReady | NetReady

PARTS_A_UID = 4
"""The number of events kept per VM: about disks, a begun network, a ready network, and one more."""
UIDS = 1000
PART_BYTES = 16 * 1024
"""The largest event that is kept. The actor itself later requests the data of a larger event."""
KEPT_S = 60.0
"""Seconds for which events are kept. A VM's record arrives sooner, or the VM is gone."""


class EarlyEvents:
    """A buffer that is bounded per VM, in total and in time. The oldest events are dropped."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[float, deque[Part]]] = {}

    def add(self, part: Part) -> None:
        """Store a ready event, or drop it if it is too large.

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
