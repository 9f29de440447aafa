"""Waits for a VM's disks and network, which imaged and netd report.

If no report arrives in time, the agent requests it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.small_event import SmallEvent
from virtbus.nodeagent.core.disk_work import DiskWork
from virtbus.nodeagent.core.disks import media
from virtbus.nodeagent.core.reported_status import contradiction
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import Ensure, ImageReady, NetReady
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

Part = TypeVar("Part", ImageReady, NetReady)

ASK_TIMEOUT_S = 3.0
WORKING = {"image_pulling": "the image is being fetched; `virtbus events -f` shows how far it is"}
ASK_AGAIN_S = (0.25, 5.0)
RECOVERING = "recovering"
"""The reason in a refusal by a service that has just started. The agent asks again."""


class Dependency(Generic[Part]):
    """One part of a VM: its disks, which imaged makes, or its network, which netd makes."""

    def __init__(
        self,
        bus: Bus,
        service: str,
        model: type[Part],
        record: Callable[[], VmRecord],
        report: Callable[[], None],
        work: DiskWork | None = None,
    ) -> None:
        """`record` returns the VM's latest record. `report` is called when `silence` changes.

        `work` counts the requests that change disks of VMs, and so make the part invalid.
        """
        self._work = work or DiskWork()
        self._work_before = self._work.requests
        self._bus = bus
        self._record = record
        self._report = report
        self._service = service
        self._model: type[Part] = model
        self._part: Part | None = None
        self._arrived = SmallEvent()
        self._needs_answer = False
        self.silence = ""
        """The reason why the part is missing, for the status; empty if none is known."""

    @property
    def latest(self) -> Part | None:
        """Return the part; None if it is missing or failed."""
        return self._part if self._part is not None and self._part.error is None else None

    def receive(self, part: Part) -> None:
        """Take the part of a ready event; ignore it while only an answer counts (`reset`)."""
        if not self._needs_answer:
            self._take(part)

    def _take(self, part: Part) -> bool:
        """Take a part; return False if the part is rejected and the service must be asked again.

        A part is rejected if the service is recovering, if the part contradicts the record, or if
        the part is of an earlier spec (`_earlier`).
        """
        if _earlier(part, self._record()):
            return False
        why = contradiction(self._record(), part)
        if why:
            extra = {"code": "part_refused", "uid": self._record().uid}
            log.warning("rejected the report of %s: %s", self._service, why, extra=extra)
            self._say(f"the report of {self._service} is rejected: {why}; see its log")
            return False
        if part.error is not None and part.error.reason == RECOVERING:
            self._say(f"{self._service}: {part.error.message}")
            return False
        self.silence, self._needs_answer = "", False
        self._part = part
        self._arrived.set()
        return True

    @property
    def reached(self) -> bool:
        """Return True if the service has made the part for the latest record."""
        return self.latest is not None and _is_of(self.latest, self._record())

    @property
    def valid(self) -> bool:
        """Return True if the part is of the latest record, and no later work made it invalid.

        Always False for a VM with volumes: a volume may change its pool within a generation.
        """
        made, record = self.latest, self._record()
        if made is None or _age(made) < _age(record) or record.volume_refs:
            return False
        return self._work_before == self._work.requests

    def reset(self, *, needs_answer: bool = False) -> None:
        """Drop the part, so that `get` waits for a new one.

        With `needs_answer`, only the answer to a later request counts, because a ready event may be
        older than the last operation on the disks.
        """
        self._part, self._needs_answer = None, needs_answer
        self._arrived.clear()

    async def get(
        self, record: VmRecord, *, ask_after_s: float, image_pull: Mapping[str, str] | None = None
    ) -> Part:
        """Return the part of this record's epoch or a later one; wait for it without limit.

        If the VM has volumes or CD-ROM drives, its disks must be of this record's generation or a
        later one, because volumes and media change within one epoch.

        If the VM has its own registry logins (`image_pull`), the request is sent at once, because
        only the agent has these logins.

        Raises:
            VirtbusError: the service reports a failure.
        """
        wanted = Ensure(record=record, image_pull=dict(image_pull or {}))
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(self._ask(wanted, 0.0 if image_pull else ask_after_s))
            try:
                part = await self._next(record)
            finally:
                asking.cancel()
        if part.error is not None:
            self.reset()
            raise VirtbusError.of(part.error)
        return part

    async def _next(self, record: VmRecord) -> Part:
        while True:
            if self._part is not None and _is_of(self._part, record):
                return self._part
            self._arrived.clear()
            await self._arrived.wait()

    async def _ask(self, wanted: Ensure, after_s: float) -> None:
        """Request the part repeatedly, with growing delays, until cancelled."""
        record = wanted.record
        delay_s = after_s
        while True:
            await asyncio.sleep(delay_s)
            work_before = self._work.requests
            try:
                answer = await self._bus.request(
                    subjects.rpc(record.node, self._service, "ensure"),
                    wanted,
                    timeout_s=ASK_TIMEOUT_S,
                )
                part = validate(self._model, answer)
                self._say("")
                if self._take(part):
                    self._work_before = work_before
            except VirtbusError as error:
                if error.code != Code.UNAVAILABLE:
                    self._take(self._model.model_validate(self._refusal(record, error)))
                self._say(WORKING.get(error.reason, f"{self._service}: {error}"))
            except BusError:
                self._say(f"waiting for {self._service}: it does not answer; see `virtbus status`")
            delay_s = min(max(delay_s * 2, ASK_AGAIN_S[0]), ASK_AGAIN_S[1])

    def _say(self, silence: str) -> None:
        if self.silence != silence:
            self.silence = silence
            self._report()

    def _refusal(self, record: VmRecord, error: VirtbusError) -> dict[str, object]:
        refusal = {"uid": record.uid, "epoch": record.epoch, "error": error.body}
        refusal["generation"] = record.generation
        return refusal | ({"phase": "failed"} if self._model is NetReady else {})


def _is_of(part: ImageReady | NetReady, record: VmRecord) -> bool:
    if part.epoch < record.epoch or _earlier(part, record):
        return False
    by_epoch = part.error is not None or isinstance(part, NetReady)
    by_epoch |= not record.volume_refs and not media(record)
    return by_epoch or part.generation >= record.generation


def _age(of: ImageReady | NetReady | VmRecord) -> tuple[int, int]:
    return of.epoch, of.generation


def _earlier(part: ImageReady | NetReady, record: VmRecord) -> bool:
    """Return True if the VM has a `network_state`, and the part is of an earlier spec.

    The spec of such a VM may add disks or change the network while the VM is off.
    """
    return record.spec.network_state is not None and part.generation < record.generation
