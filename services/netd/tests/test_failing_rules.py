"""Rules of a running guest that its host cannot apply, and what happens to the other guests."""

from types import SimpleNamespace
from typing import Any, cast

from services.netd.tests.pretended_host import make_record
from services.netd.tests.test_network_objects import A, B, target

from virtbus.netd.attachments import Attachments
from virtbus.netd.builder import HostPorts
from virtbus.netd.core.attachment import Attachment
from virtbus.netd.core.plan import plan_of
from virtbus.netd.reporter import NetworkReporter
from virtbus.netd.segment_guests import SegmentGuests
from virtbus.schemas.errors import Code, VirtbusError

NO_FILTER = VirtbusError(Code.UNSUPPORTED, "no_bridge_filter", "load br_netfilter")


class Refusing:
    """Attachments that are ready; the rules of some cannot be applied."""

    def __init__(self, *ready: Attachment, refuses: str) -> None:
        self._ready = ready
        self._refuses = refuses
        self.amended: list[str] = []

    def ready(self) -> list[Attachment]:
        return list(self._ready)

    async def amend(self, uid: str, _change: Any) -> None:
        if uid == self._refuses:
            raise NO_FILTER
        self.amended.append(uid)


async def test_a_guest_whose_rules_are_refused_keeps_no_other_from_the_rules_of_reach() -> None:
    ready = [plan_of(make_record(uid, **target("bridge", link="br0"))) for uid in (A, B)]
    there = Refusing(*ready, refuses=A)
    doors = cast("HostPorts", SimpleNamespace(bridge=None, dhcp=SimpleNamespace()))
    guests = SegmentGuests(doors, cast("Attachments", there), cast("NetworkReporter", None))
    await guests.guard()
    assert there.amended == [B]
