"""QEMU's guest agent in our guests, by libvirt (`virDomainGetGuestInfo`).

Not `qemuAgentCommand`, which taints the domain. A guest may hang, lie or never stop: each is asked
once at a time, on connections that nothing else uses, and libvirt's own time limit ends the call.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence

import libvirt

from virtbus.nodeagent.edge.libvirt_domains import on_ours
from virtbus.nodeagent.edge.libvirt_links import Links
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest import GuestQuestion

LIMIT_S = 180.0
"""Longer than libvirt takes for all questions when each answer comes at the last moment."""
_TYPES = {
    GuestQuestion.PING: libvirt.VIR_DOMAIN_GUEST_INFO_HOSTNAME,
    GuestQuestion.OS: libvirt.VIR_DOMAIN_GUEST_INFO_OS
    | libvirt.VIR_DOMAIN_GUEST_INFO_TIMEZONE
    | libvirt.VIR_DOMAIN_GUEST_INFO_HOSTNAME,
    GuestQuestion.USERS: libvirt.VIR_DOMAIN_GUEST_INFO_USERS,
    GuestQuestion.FILESYSTEMS: libvirt.VIR_DOMAIN_GUEST_INFO_FILESYSTEM,
    GuestQuestion.INTERFACES: libvirt.VIR_DOMAIN_GUEST_INFO_INTERFACES,
}
_ALL_IT_KNOWS = 0
_MOST_S = 10
"""What libvirt waits for each answer at most, however patient the asker is."""


class LibvirtGuests:
    """The `GuestAgents` port."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._asked: dict[str, asyncio.Event] = {}
        """By uid, while a call is under way; set at its end."""

    async def ask(
        self, uid: str, about: Sequence[GuestQuestion], *, timeout_s: float
    ) -> Mapping[str, object]:
        """Libvirt's own map of answers, within `timeout_s`.

        Raises:
            VirtbusError: 409 `guest_agent_absent`, 503 `guest_agent_silent`, 409 `domain_state`.
        """
        types = 0
        for question in about:
            types |= _TYPES[question]

        def run(domain: libvirt.virDomain) -> Mapping[str, object]:
            domain.agentSetResponseTimeout(min(math.ceil(timeout_s), _MOST_S))
            return domain.guestInfo(types or _ALL_IT_KNOWS)

        try:
            async with asyncio.timeout(timeout_s):
                while (earlier := self._asked.get(uid)) is not None:
                    await earlier.wait()
                # From here on until libvirt has returned, though the asker may have left.
                self._asked[uid] = asyncio.Event()
                found = await on_ours(
                    self._links,
                    uid,
                    run,
                    "ask the guest agent",
                    timeout_s=LIMIT_S,
                    ended=lambda: self._asked.pop(uid).set(),
                )
        except TimeoutError:
            message = (
                f"the guest agent does not answer within {timeout_s:g} s; wait longer (timeout_s), "
                "or in the guest: systemctl restart qemu-guest-agent"
            )
            raise VirtbusError(Code.UNAVAILABLE, "guest_agent_silent", message) from None
        if found is None:
            message = "the guest is not running here; `virtbus vm get` shows its state"
            raise VirtbusError(Code.CONFLICT, "domain_state", message)
        return found

    def close(self) -> None:
        """Close the connections that nothing uses."""
        self._links.close()
