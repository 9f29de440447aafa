"""Holds one VM's network in netd's memory: its attachment, phase and error."""

import asyncio
from dataclasses import dataclass, field

from virtbus.netd.core.attachment import Attachment
from virtbus.netd.core.finding import NetworkFinding, lost
from virtbus.schemas.errors import Code, ErrorBody, VirtbusError
from virtbus.schemas.node_rpc import NetPhase, NetReady

ENDS_TRIED = 3
"""After this many failed releases, a forced release gives up, and the plugin's leftovers stay."""


@dataclass(slots=True)
class NetworkEntry:
    """One VM's network. Only the task that holds the VM's lock changes it."""

    attachment: Attachment
    phase: NetPhase | None = None
    """None if the network is not built: netd only keeps its addresses."""
    error: ErrorBody | None = None
    relabelled: bool = False
    """True until the rules for a running guest's new labels are in force."""
    failed_ends: int = 0
    """The number of releases in which a CNI plugin failed."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the phase is ready or failed."""

    def settle(self, phase: NetPhase, error: ErrorBody | None = None) -> None:
        self.phase, self.error = phase, error
        self.settled.set()

    def mark_unbuilt(self) -> None:
        """Keep only the addresses. The next `ensure` makes the network again."""
        self.phase = None
        self.settled.clear()

    async def attached(self, timeout_s: float) -> Attachment:
        """Return the attachment once its phase is final.

        Raises:
            VirtbusError: 504 `network_late` after `timeout_s`, or the error of a failed network.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self.settled.wait()
        except TimeoutError:
            raise VirtbusError(
                Code.DEADLINE,
                "network_late",
                f"the network was not attached in {timeout_s:g} s; see the CNI plugin's log, "
                "start the VM again",
            ) from None
        if self.error is not None:
            raise VirtbusError.of(self.error)
        return self.attachment

    def gives_up(self, *, forced: bool) -> bool:
        """Count a failed release. Return True if the caller should give up a forced release."""
        self.failed_ends += 1
        return forced and self.failed_ends >= ENDS_TRIED

    def cut_off(self, faults: list[str]) -> NetworkFinding:
        finding = lost(self.attachment, faults)
        self.settle(NetPhase.FAILED, finding.error)
        return finding

    @property
    def used(self) -> VirtbusError:
        """The error of a removal while a guest runs with this network."""
        message = "a guest runs with this network; netd removes it after the guest's end"
        return VirtbusError(Code.UNAVAILABLE, "network_used", message, after_ms=500)

    def ready(self) -> NetReady:
        return NetReady(
            uid=self.attachment.uid,
            epoch=self.attachment.epoch,
            generation=self.attachment.generation,
            phase=self.phase or NetPhase.FAILED,
            interfaces=self.attachment.statuses(),
            error=self.error,
        )
