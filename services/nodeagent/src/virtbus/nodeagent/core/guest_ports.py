"""Defines the ports to the guest agents inside guests."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from virtbus.schemas.guest import GuestExecuted, GuestQuestion


class GuestAgents(Protocol):
    """QEMU's guest agent inside virtbus' guests."""

    async def ask(
        self, uid: str, about: Sequence[GuestQuestion], *, timeout_s: float
    ) -> Mapping[str, object]:
        """Return libvirt's flat map of answers, within `timeout_s`.

        Raises:
            VirtbusError: 409 `guest_agent_absent`: no guest agent runs in the guest.
                503 `guest_agent_silent`: the guest agent does not answer.
                409 `domain_state`: no guest runs.
        """

    async def freeze(self, uid: str, *, timeout_s: float) -> bool:
        """Freeze the guest's file systems within `timeout_s`; return False if no guest runs.

        Raises:
            VirtbusError: 409 `guest_frozen`: the guest was frozen before.
                409 `guest_agent_refused`: the guest agent refuses.
                The errors of `ask` without `domain_state`. After `guest_frozen`,
                `guest_agent_refused` and `guest_agent_absent`, this call has frozen nothing. After
                any other error, the guest may be frozen.
        """

    async def thaw(self, uid: str, *, timeout_s: float) -> bool:
        """Thaw the guest's file systems. Return False if no guest runs. Raises as `freeze`."""


class GuestPrograms(GuestAgents, Protocol):
    """QEMU's guest agent as a runner of programs."""

    async def execute(self, uid: str, words: Sequence[str], *, timeout_s: float) -> GuestExecuted:
        """Run a program in the guest, and wait for its end; kill it after `timeout_s`.

        Raises:
            VirtbusError: 409 `guest_agent_refused`: the guest agent refuses.
                504 `exec_timeout`: the program did not end in time, and was killed.
                The errors of `ask`.
        """
