"""Handles `virtbus.api.v1.vm.{reset,soft-reboot,freeze,thaw}`: asks the VM's agent."""

import asyncio

from virtbus.bus.client.endpoints import refuse_late
from virtbus.bus.client.ports import Bus, Request
from virtbus.bus.errors import OutcomeUnknownError, UnavailableError
from virtbus.controller.core.vm_keys import StoredVm
from virtbus.controller.edge.vm_api import VmApi
from virtbus.schemas import subjects
from virtbus.schemas.api import VmCommand, VmFreeze
from virtbus.schemas.errors import Code, Retry, VirtbusError
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.node_rpc import GuestCommand, GuestFreeze
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.vm_status import VmView
from virtbus.schemas.wire import validate

ANSWER_S = 1.0
"""Time before the deadline that is reserved for the controller's answer. At least half of the time
that is left is for the agent."""


class VmCommands:
    """The handlers of commands.

    The bus stores nothing: the agent acts within the time limit of the request, or never.
    """

    def __init__(self, bus: Bus, vms: VmApi) -> None:
        self._bus = bus
        self._vms = vms

    async def reset(self, request: Request) -> VmView:
        return await self._command("reset", request)

    async def soft_reboot(self, request: Request) -> VmView:
        return await self._command("soft-reboot", request)

    async def freeze(self, request: Request) -> VmView:
        want = validate(VmFreeze, request.data)
        return await self._freeze(want, want.timeout_s, request)

    async def thaw(self, request: Request) -> VmView:
        return await self._freeze(validate(VmCommand, request.data), 0, request)

    async def _command(self, verb: str, request: Request) -> VmView:
        held = await self._placed(validate(VmCommand, request.data), request)
        record = held.record
        command = {"uid": record.uid, "epoch": record.epoch, "verb": verb}
        asked = GuestCommand.model_validate(
            command | {"id": request.id or self._bus.sources.uuid7()}
        )
        await self._ask(record, verb, asked, request)
        return self._vms.show(held)

    async def _freeze(self, want: VmCommand, timeout_s: int, request: Request) -> VmView:
        held = await self._placed(want, request)
        record, verb = held.record, "freeze" if timeout_s else "thaw"
        asked = GuestFreeze(uid=record.uid, epoch=record.epoch, timeout_s=timeout_s)
        await self._ask(record, verb, asked, request)
        return self._vms.show(held)

    async def _placed(self, want: VmCommand, request: Request) -> StoredVm:
        """Return the VM; raise 409 `moved` if it has no node, or not the requested epoch."""
        held = await self._vms.find(want, request.account)
        record = held.record
        if want.epoch not in {None, record.epoch} or record.node == UNPLACED:
            message = (
                f"{record.name} is not on that node; `virtbus vm get {record.name}` shows where"
            )
            raise VirtbusError(Code.CONFLICT, "moved", message)
        return held

    async def _ask(
        self, record: VmRecord, verb: str, asked: GuestCommand | GuestFreeze, request: Request
    ) -> None:
        """Send a request to the VM's agent; raise VirtbusError for a refusal or no answer."""
        refuse_late(request.deadline_s)
        left_s = request.deadline_s - asyncio.get_running_loop().time()
        endpoint = "command" if isinstance(asked, GuestCommand) else "freeze"
        try:
            await self._bus.request(
                subjects.rpc(record.node, "agent", endpoint),
                asked,
                timeout_s=max(left_s - ANSWER_S, left_s / 2),
                request_id=asked.id if isinstance(asked, GuestCommand) else request.id or None,
            )
        except VirtbusError as error:
            if error.reason != "vm_not_here":
                raise
            message = (
                f"{record.name} does not run on {record.node}: it has not started there yet, or "
                f"has left; `virtbus vm get {record.name}` shows where it is"
            )
            raise VirtbusError(Code.CONFLICT, "not_running", message) from error
        except UnavailableError as error:
            message = (
                f"nothing was done: {record.node} does not answer; "
                f"`virtbus node get {record.node}` shows its state"
            )
            raise VirtbusError(
                Code.UNAVAILABLE, "node_silent", message, retry=Retry.SAME_ID, after_ms=1000
            ) from error
        except OutcomeUnknownError as error:
            message = (
                f"{record.node} did not answer in time: the {verb} may have happened; "
                "repeat the request with the same id to get its result"
            )
            raise VirtbusError(Code.DEADLINE, "unanswered", message) from error
