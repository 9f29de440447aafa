"""Freezes a guest's file systems for the instant of a snapshot, backup or reading of disks."""

import logging

from virtbus.nodeagent.core.freezes import Freezes
from virtbus.schemas.errors import VirtbusError

log = logging.getLogger(__name__)

FREEZE_S = 60.0
"""After this time at the latest, this agent or its successor thaws the guest."""
FREEZE_TIMEOUT_S = 10.0
THAW_S = 10.0


async def freeze(freezes: Freezes, uid: str) -> str:
    """Freeze the guest's file systems. Return "", or the reason for no new freeze.

    A freeze by a user keeps its deadline.
    """
    if freezes.of(uid) is not None:
        return "a user has frozen it before"
    try:
        await freezes.freeze(uid, for_s=FREEZE_S, timeout_s=FREEZE_TIMEOUT_S)
    except VirtbusError as error:
        return f"the guest was not frozen: {error}"
    return ""


async def thaw(freezes: Freezes, uid: str, why: str) -> None:
    """Thaw the guest. After an error, the guest stays frozen until the freeze's deadline."""
    try:
        await freezes.thaw(uid, why, timeout_s=THAW_S)
    except VirtbusError as error:
        extra = {"code": error.reason, "uid": uid}
        log.warning("not thawed yet (%s): %s", why, error, extra=extra)
