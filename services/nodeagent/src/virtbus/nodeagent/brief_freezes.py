"""Freezes a guest's file systems for the instant of a snapshot, a backup or a reading of disks."""

import logging

from virtbus.nodeagent.core.freezes import Freezes
from virtbus.schemas.errors import VirtbusError

log = logging.getLogger(__name__)

FREEZE_S = 60.0
"""The agent, or after its death the next agent, thaws the guest at the latest after this time."""
FREEZE_TIMEOUT_S = 10.0
THAW_S = 10.0


async def freeze(freezes: Freezes, uid: str) -> str:
    """Freeze the guest's file systems. Return the reason if this froze nothing; otherwise "".

    If a user has frozen the guest already, nothing is done, so that the user's freeze keeps its
    deadline.
    """
    if freezes.of(uid) is not None:
        return "a user has frozen it before"
    try:
        await freezes.freeze(uid, for_s=FREEZE_S, timeout_s=FREEZE_TIMEOUT_S)
    except VirtbusError as error:
        return f"the guest was not frozen: {error}"
    return ""


async def thaw(freezes: Freezes, uid: str, why: str) -> None:
    """Thaw the guest. After an error, the guest stays frozen until the deadline of the freeze."""
    try:
        await freezes.thaw(uid, why, timeout_s=THAW_S)
    except VirtbusError as error:
        extra = {"code": error.reason, "uid": uid}
        log.warning("not thawed yet (%s): %s", why, error, extra=extra)
