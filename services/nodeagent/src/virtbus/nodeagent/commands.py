"""Handles `rpc.agent.command` and `rpc.agent.freeze`, which leave no desired state.

A command acts at most once for each id. The agent stores the id on disk before the act, so that
neither a repeated request nor a restarted agent acts again (ADR 0021). A freeze may be repeated.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping

from virtbus.bus.client import tracing
from virtbus.bus.client.endpoints import refuse_late
from virtbus.bus.client.ports import Request
from virtbus.bus.runtime.keyed_lock import KeyedLock
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.freezes import FreezeChange
from virtbus.nodeagent.vm.actor import VmActor
from virtbus.nodeagent.vm.machine import UP
from virtbus.schemas.api import Empty
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.node_rpc import GuestCommand, GuestFreeze
from virtbus.schemas.wire import validate

KEPT = 64
"""The number of stored commands per VM, to recognise repeats."""
BEGUN, DONE = "begun", "done"
KINDS = {"reset": EventKind.GUEST_RESET, "soft-reboot": EventKind.GUEST_REBOOTING}
FREEZE_KINDS: dict[FreezeChange, EventKind] = {
    "frozen": EventKind.GUEST_FROZEN,
    "thawed": EventKind.GUEST_THAWED,
}
ANSWER_S = 0.5
"""Seconds of a request's time that the agent reserves for its own answer."""


class Commands:
    """Runs commands. `guests` is the agent's live map of actors by uid."""

    def __init__(
        self, tools: AgentPorts, guests: Mapping[str, VmActor], check_here: Callable[[str], None]
    ) -> None:
        """`check_here` raises for a VM that is not on this node."""
        self._tools = tools
        self._guests = guests
        self._check_here = check_here
        self._locks = KeyedLock()
        self._acts: dict[str, Callable[[str], Awaitable[bool]]] = {
            "reset": tools.hypervisor.reset,
            "soft-reboot": tools.hypervisor.reboot,
        }
        tools.freezes.heard = self._heard

    async def do(self, request: Request) -> Empty:
        """Run a command.

        Raises:
            VirtbusError: the command did not run, or its outcome is unknown.
        """
        want = validate(GuestCommand, request.data)
        self._check_here(want.uid)
        async with self._locks.of(want.uid):
            with tracing.span(f"virtbus {want.verb} guest", uid=want.uid):
                await self._once(want, request.deadline_s)
        return Empty()

    async def freeze(self, request: Request) -> Empty:
        """Freeze or thaw a guest. A frozen guest gets the new deadline.

        Raises:
            VirtbusError: the request failed. A guest that it may have frozen is thawed at once. A
                guest that was frozen before keeps its deadline.
        """
        want = validate(GuestFreeze, request.data)
        self._check_here(want.uid)
        refuse_late(request.deadline_s)
        guest = self._fit(want.uid, want.epoch)
        if guest.vm.phase == "paused":
            raise _paused(guest)
        left_s = request.deadline_s - asyncio.get_running_loop().time() - ANSWER_S
        timeout_s, freezes = max(left_s, ANSWER_S), self._tools.freezes
        with tracing.span("virtbus freeze guest", uid=want.uid):
            if want.timeout_s:
                await freezes.freeze(want.uid, for_s=want.timeout_s, timeout_s=timeout_s)
            else:
                await freezes.thaw(want.uid, "asked", timeout_s=timeout_s)
        return Empty()

    def _heard(self, uid: str, change: FreezeChange, why: str) -> None:
        guest = self._guests.get(uid)
        if guest is None:
            return
        if change in FREEZE_KINDS:
            self._tools.events.emit(FREEZE_KINDS[change], guest.vm.record, reason=why)
        guest.vm.observed.frozen = self._tools.freezes.of(uid)
        guest.report()

    async def _once(self, want: GuestCommand, deadline_s: float) -> None:
        files = self._tools.files
        results = dict(await files.commands(want.uid))
        if results.get(want.id) == DONE:
            return
        if want.id in results:
            raise _unknown(want, "its agent died meanwhile")
        refuse_late(deadline_s)
        guest = self._fit_command(want)
        results = dict(itertools.islice(results.items(), max(len(results) - KEPT + 1, 0), None))
        await files.keep_commands(want.uid, results | {want.id: BEGUN})
        try:
            acted = await self._acts[want.verb](want.uid)
        except VirtbusError as error:
            raise _unknown(want, str(error)) from error
        if not acted:
            await files.keep_commands(want.uid, results)
            raise _not_running(guest)
        self._tools.events.emit(KINDS[want.verb], guest.vm.record, reason="asked")
        await files.keep_commands(want.uid, results | {want.id: DONE})

    def _fit_command(self, want: GuestCommand) -> VmActor:
        """Return the actor of the command's VM; raise 409 or 503 if its guest is not fit."""
        guest = self._fit(want.uid, want.epoch)
        if want.verb == "soft-reboot" and guest.vm.phase == "paused":
            raise _paused(guest)
        if want.verb == "soft-reboot" and guest.vm.observed.frozen is not None:
            name = guest.vm.record.name
            message = f"{name} is frozen and cannot reboot; `virtbus vm thaw {name}` first"
            raise VirtbusError(Code.CONFLICT, "frozen", message)
        return guest

    def _fit(self, uid: str, epoch: int) -> VmActor:
        """Return the actor of a VM whose guest is up, or raise 409 or 503."""
        guest = self._guests.get(uid)
        if guest is None or guest.vm.record.epoch != epoch or guest.vm.record.ending:
            message = f"{uid} was moved or is being deleted; read it again"
            raise VirtbusError(Code.CONFLICT, "moved", message)
        if guest.vm.reasons.held:
            raise VirtbusError(Code.UNAVAILABLE, "held", guest.vm.reasons.held, after_ms=1000)
        if guest.vm.phase not in UP:
            raise _not_running(guest)
        return guest


def _paused(guest: VmActor) -> VirtbusError:
    name = guest.vm.record.name
    message = f"{name} is paused and cannot react; `virtbus vm unpause {name}` first"
    return VirtbusError(Code.CONFLICT, "paused", message)


def _not_running(guest: VmActor) -> VirtbusError:
    name = guest.vm.record.name
    message = f"{name} is not running; `virtbus vm start {name}` starts it"
    return VirtbusError(Code.CONFLICT, "not_running", message)


def _unknown(want: GuestCommand, why: str) -> VirtbusError:
    message = (
        f"the {want.verb} was begun and may have happened ({why}); check the guest, then ask again"
    )
    return VirtbusError(Code.CONFLICT, "outcome_unknown", message)
