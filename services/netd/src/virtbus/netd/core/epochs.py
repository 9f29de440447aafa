"""Refusal of requests with an outdated epoch, from before a release or new assignment of the VM."""

from virtbus.bus.runtime.recent import Recent
from virtbus.netd.core.attachment import Attachment
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import ANY_EPOCH

MAX_REMEMBERED = 10_000
"""Number of uids whose released epoch is kept in memory. The agent's epoch ledger is durable."""


def check_epoch(uid: str, asked: int, known: Attachment | None) -> None:
    """Refuse an epoch below that of the known attachment.

    Raises:
        VirtbusError: 409 `stale_epoch`.
    """
    if known is not None and asked < known.epoch:
        raise VirtbusError(
            Code.CONFLICT,
            "stale_epoch",
            f"epoch {asked} of VM {uid} is outdated, now {known.epoch}; read the record again",
        )


class ReleasedEpochs:
    """The highest released epoch of each uid. Requests up to this epoch are outdated."""

    def __init__(self) -> None:
        self._epochs: Recent[str, int] = Recent(MAX_REMEMBERED)

    def add(self, uid: str, epoch: int) -> None:
        """Accept only higher epochs of `uid` from now on. `ANY_EPOCH` restricts nothing."""
        if epoch >= ANY_EPOCH:
            return
        self._epochs[uid] = max(epoch, self._epochs.get(uid, 0))

    def check(self, uid: str, epoch: int) -> None:
        """Refuse a released epoch.

        Raises:
            VirtbusError: 409 `released`.
        """
        if epoch <= self._epochs.get(uid, 0):
            raise VirtbusError(
                Code.CONFLICT,
                "released",
                f"the network of epoch {epoch} was released; a new assignment has a higher epoch",
            )
