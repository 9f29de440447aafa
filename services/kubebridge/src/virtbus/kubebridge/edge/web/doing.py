"""Executes a call's effects: patches of objects, verbs of the bus, guest agent questions."""

from typing import Any

from virtbus.kubebridge.core.api import guest_answers
from virtbus.kubebridge.core.objects.refusals import conflict, not_found
from virtbus.kubebridge.core.runtime import kinds
from virtbus.kubebridge.core.runtime.calls import KINDS, AskGuest, Bus, Call, Deed, Give, Patch
from virtbus.kubebridge.core.runtime.kinds import Kind
from virtbus.kubebridge.edge.cluster import Answer, Cluster
from virtbus.kubebridge.edge.web.answers import RefusedError
from virtbus.kubebridge.edge.web.guests import Guests
from virtbus.schemas.guest import GuestInfo

MEANWHILE = "the object has been modified; please apply your changes to the latest version"
PLACES: dict[str, tuple[Kind, str]] = {
    "vm": (kinds.VM, ""),
    "vm/status": (kinds.VM, "status"),
    "vmi": (kinds.VMI, ""),
}
TOLD = {
    "guestosinfo": guest_answers.os_info,
    "userlist": guest_answers.users,
    "filesystemlist": guest_answers.filesystems,
}


class Doing:
    """Executes the effects of one call."""

    def __init__(self, cluster: Cluster, guests: Guests, call: Call, namespace: str) -> None:
        self._cluster = cluster
        self._guests = guests
        self._call = call
        self._namespace = namespace

    async def do(self, deed: Deed) -> Any:
        """Execute one effect. Return an object for the answer, or None.

        Raises:
            RefusedError: the object is gone, or was changed since it was read.
            Answer, VirtbusError, BusError: the effect was refused.
        """
        match deed:
            case Patch():
                await self._patch(deed)
            case Bus():
                await self._guests.ask(deed.verb, deed.uid)
            case AskGuest():
                told: GuestInfo = await self._guests.tell(deed.uid, deed.questions)
                return TOLD[self._call.verb](told)
            case Give():
                return deed.what
            case _:
                raise AssertionError(deed)
        return None

    async def _patch(self, patch: Patch) -> None:
        kind, sub = PLACES[patch.of]
        name = KINDS[kind.plural]
        try:
            await self._cluster.patch(
                kind,
                self._call.name,
                list(patch.operations),
                self._namespace,
                sub,
                "json",
                dry_run=self._call.dry_run,
            )
        except Answer as answer:
            if answer.code == 404:
                raise RefusedError(not_found(name, self._call.name)) from None
            if answer.code == 409 or _test_failed(answer):
                raise RefusedError(conflict(name, self._call.name, MEANWHILE)) from None
            raise


def _test_failed(answer: Answer) -> bool:
    """Return True for a failed test of a patch, a 422 without causes."""
    details = answer.status.get("details") or {}
    return answer.code == 422 and not details.get("causes")
