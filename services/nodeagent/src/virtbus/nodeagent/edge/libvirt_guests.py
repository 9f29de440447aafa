"""Asks QEMU's guest agents through libvirt (`virDomainGetGuestInfo`, `virDomainFSFreeze`).

`qemuAgentCommand` is used for programs only, because it taints the domain. A guest agent may hang
or be hostile. So each guest has at most one call in flight, and libvirt's time limit ends the call.
The connections serve only guest agents. Guests that were slow recently have separate connections,
so that quick guests do not wait for slow ones.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import libvirt

from virtbus.nodeagent.edge import guest_programs
from virtbus.nodeagent.edge.libvirt_domains import on_ours
from virtbus.nodeagent.edge.libvirt_errors import cause
from virtbus.nodeagent.edge.libvirt_links import LibvirtLinks
from virtbus.nodeagent.edge.serial_calls import SerialCalls
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest import GuestExecuted, GuestQuestion

LIMIT_S = 180.0
"""Time limit of a libvirt call. A call with all questions takes less, even if each answer arrives
only just before libvirt's own limit."""
_TYPES = {
    GuestQuestion.PING: libvirt.VIR_DOMAIN_GUEST_INFO_HOSTNAME,
    GuestQuestion.OS: libvirt.VIR_DOMAIN_GUEST_INFO_OS
    | libvirt.VIR_DOMAIN_GUEST_INFO_TIMEZONE
    | libvirt.VIR_DOMAIN_GUEST_INFO_HOSTNAME,
    GuestQuestion.USERS: libvirt.VIR_DOMAIN_GUEST_INFO_USERS,
    GuestQuestion.FILESYSTEMS: libvirt.VIR_DOMAIN_GUEST_INFO_FILESYSTEM,
    GuestQuestion.INTERFACES: libvirt.VIR_DOMAIN_GUEST_INFO_INTERFACES,
}
_MOST_S = 10
"""Maximum time that libvirt waits for one answer, also if the caller allows more time."""


QUICK_S = 1
"""Time that libvirt waits for an answer of a guest that was not slow recently."""
SLOW_FOR_S = 600.0
"""Time for which a guest counts as slow. With a short time, slow guests would delay quick ones."""
_LOOK_S = 0.05
"""First pause between two questions whether a program has ended. Pauses double up to 1 s."""
Answer = TypeVar("Answer")


class LibvirtGuests:
    """The `GuestPrograms` port. `quick` and `slow` are the connections for quick and slow guests.

    A freeze may take seconds even in a quick guest, so `freezes` are separate connections.
    """

    def __init__(self, quick: LibvirtLinks, slow: LibvirtLinks, freezes: LibvirtLinks) -> None:
        self._quick = quick
        self._slow = slow
        self._freezes = freezes
        self._one_each = SerialCalls()
        self._slow_until_s: dict[str, float] = {}

    async def ask(
        self, uid: str, about: Sequence[GuestQuestion], *, timeout_s: float
    ) -> Mapping[str, object]:
        """Return libvirt's flat map of answers.

        Raises:
            VirtbusError: 409 `guest_agent_absent`: no guest agent runs in the guest. 503
                `guest_agent_silent`: no answer in time. 409 `domain_state`: no guest runs.
        """
        types = 0
        for question in about:
            types |= _TYPES[question]

        def read(domain: libvirt.virDomain) -> Mapping[str, object]:
            return domain.guestInfo(types)  # for libvirt, 0 means all types

        found = await _in_time(self._asked(uid, read, timeout_s), timeout_s)
        if found is None:
            message = "the guest is not running here; `virtbus vm get` shows its state"
            raise VirtbusError(Code.CONFLICT, "domain_state", message)
        return found

    async def freeze(self, uid: str, *, timeout_s: float) -> bool:
        """Freeze the guest's file systems; return False if no guest runs.

        Raises:
            VirtbusError: the errors of `ask`. 409 `guest_frozen`: the guest is frozen already. 409
                `guest_agent_refused`: the guest agent refuses the command.
        """
        asked = self._once(self._freezes, uid, _frozen, min(timeout_s, _MOST_S))
        return bool(await _in_time(asked, timeout_s))

    async def thaw(self, uid: str, *, timeout_s: float) -> bool:
        """Thaw the guest's file systems; return False if no guest runs. Raises as `freeze`."""
        return bool(await _in_time(self._asked(uid, _thawed, timeout_s), timeout_s))

    async def execute(self, uid: str, words: Sequence[str], *, timeout_s: float) -> GuestExecuted:
        """Run a program in the guest, and wait for its end. Kill the program after `timeout_s`.

        Raises:
            VirtbusError: the errors of `freeze`. 504 `exec_timeout`: the program was killed. 503
                `guest_agent_silent`: the start or the kill got no answer; the program may run.
        """
        until_s = time.monotonic() + timeout_s
        begin = guest_programs.begin(words, capture=True)
        pid = await self._of_a_program(uid, begin, timeout_s, once=True)
        pause_s = _LOOK_S
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                done = await self._of_a_program(uid, guest_programs.end(pid), max(left_s, QUICK_S))
            except guest_programs.MalformedError:
                raise
            except VirtbusError as error:
                if error.reason != "guest_agent_silent":
                    raise
                done = None  # the program may run on, so the guest agent is asked again
            if done is not None:
                return done
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, 1.0)
        kill = guest_programs.begin(("kill", "-KILL", str(pid)), capture=False)
        await self._of_a_program(uid, kill, _MOST_S, once=True)
        message = f"the command did not end within {timeout_s:g} s and was killed"
        raise VirtbusError(Code.DEADLINE, "exec_timeout", message)

    async def _of_a_program(
        self,
        uid: str,
        call: Callable[[libvirt.virDomain], Answer],
        timeout_s: float,
        *,
        once: bool = False,
    ) -> Answer:
        """Return the answer to a call about a program.

        With `once`, the call is made only once, and may take as long as in a slow guest. A guest
        agent that answers too late may have started the program, so a repeat could start a second.
        """
        work = _answered(call)
        if once:
            asked = self._once(self._slow, uid, work, min(timeout_s, _MOST_S))
        else:
            asked = self._asked(uid, work, timeout_s)
        found = await _in_time(asked, timeout_s)
        if found is None:
            message = "the guest is not running here; `virtbus vm get` shows its state"
            raise VirtbusError(Code.CONFLICT, "domain_state", message)
        return found[0]

    async def _asked(
        self, uid: str, work: Callable[[libvirt.virDomain], Answer], timeout_s: float
    ) -> Answer | None:
        until_s = time.monotonic() + timeout_s
        if not self._is_slow(uid):
            try:
                return await self._once(self._quick, uid, work, QUICK_S)
            except VirtbusError:
                if not self._is_slow(uid):
                    raise
        patience_s = min(until_s - time.monotonic(), _MOST_S)
        return await self._once(self._slow, uid, work, patience_s)

    async def _once(
        self,
        links: LibvirtLinks,
        uid: str,
        work: Callable[[libvirt.virDomain], Answer],
        patience_s: float,
    ) -> Answer | None:
        began_s: list[float] = []

        def run(domain: libvirt.virDomain) -> Answer:
            began_s.append(time.monotonic())
            domain.agentSetResponseTimeout(max(math.ceil(patience_s), 1))
            return work(domain)

        def ended() -> None:
            self._one_each.end(uid)
            now_s = time.monotonic()
            if began_s and now_s - began_s[0] >= QUICK_S:
                self._mark(uid, now_s)

        await self._one_each.begin(uid)
        return await on_ours(links, uid, run, "ask the guest agent", timeout_s=LIMIT_S, ended=ended)

    def _is_slow(self, uid: str) -> bool:
        return self._slow_until_s.get(uid, 0.0) > time.monotonic()

    def _mark(self, uid: str, now_s: float) -> None:
        marks = self._slow_until_s.items()
        self._slow_until_s = {one: until_s for one, until_s in marks if until_s > now_s}
        self._slow_until_s[uid] = now_s + SLOW_FOR_S


async def _in_time(asked: Awaitable[Answer], timeout_s: float) -> Answer:
    try:
        async with asyncio.timeout(timeout_s):
            return await asked
    except TimeoutError:
        message = (
            f"the guest agent does not answer within {timeout_s:g} s; wait longer (timeout_s), "
            "or in the guest: systemctl restart qemu-guest-agent"
        )
        raise VirtbusError(Code.UNAVAILABLE, "guest_agent_silent", message) from None


def _answered(
    call: Callable[[libvirt.virDomain], Answer],
) -> Callable[[libvirt.virDomain], tuple[Answer]]:
    """Return a function that runs `call`, and translates refusals of the guest agent.

    The function returns a tuple, because `on_ours` returns None for a missing domain.
    """

    def run(domain: libvirt.virDomain) -> tuple[Answer]:
        try:
            return (call(domain),)
        except libvirt.libvirtError as error:
            refusal = _refused(error)
            if refusal is None:
                raise
            raise refusal from error

    return run


def _act(act: Callable[[libvirt.virDomain], object]) -> Callable[[libvirt.virDomain], bool]:
    def run(domain: libvirt.virDomain) -> bool:
        if not domain.isActive():
            return False
        try:
            act(domain)
        except libvirt.libvirtError as error:
            refusal = _refused(error)
            if refusal is None:
                raise
            raise refusal from error
        return True

    return run


_frozen = _act(lambda domain: domain.fsFreeze())
_thawed = _act(lambda domain: domain.fsThaw())


def _refused(error: libvirt.libvirtError) -> VirtbusError | None:
    """Return the guest agent's own refusal; None if libvirt refuses or the guest agent is silent.

    While a guest is frozen, its guest agent reports most commands as disabled. A guest agent older
    than QEMU 6.2 gives no reason. With such an agent, a command that the guest's administrator
    disabled is also reported as `guest_frozen`.
    """
    text = cause(error.get_error_message() or "")
    if error.get_error_code() != libvirt.VIR_ERR_INTERNAL_ERROR or "agent command" not in text:
        return None
    frozen = "disabled" in text and "not allowed" not in text
    if frozen:
        message = "file systems of the guest are frozen already; `virtbus vm thaw` ends that"
        return VirtbusError(Code.CONFLICT, "guest_frozen", message)
    return VirtbusError(Code.CONFLICT, "guest_agent_refused", f"the guest agent refuses: {text}")
