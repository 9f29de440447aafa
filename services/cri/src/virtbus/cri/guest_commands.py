"""Runs the commands of Exec and ExecSync in guests.

ExecSync uses the guest agent. If the guest has no guest agent, or the bus is away, ExecSync uses
SSH with the pod's key. Exec always uses SSH, because the guest agent cannot carry its streams.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple

from virtbus.bus.errors import BusError, OutcomeUnknownError
from virtbus.bus.runtime.keyed_lock import KeyedLock
from virtbus.cri.core.pod import Machine, ShellKey
from virtbus.cri.core.remote_command import Wanted
from virtbus.cri.edge.bus_link import BusLink, away
from virtbus.cri.edge.guest_shell import GuestShell, Outcome
from virtbus.cri.edge.pipes import Pipe
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest import EXEC_OUTPUT_BYTES, EXEC_S, GuestExec, GuestExecuted
from virtbus.schemas.wire import validate

NO_AGENT = frozenset({"bus_away", "guest_agent_absent", "guest_agent_refused", "guest_simulated"})
"""Reasons of errors that prove that the command has not run. Then SSH may run the command."""
ANSWER_S = 5.0
"""Time for the agent's answer after the time limit of the command."""
SLACK_S = 0.5
"""Time before a call's end at which a wait for the agent or the guest ends. In this time, the call
reports the reason."""

BOOT_S = 120.0
"""Time after a guest's start in which the guest may still boot. A command waits for the boot."""
LOOK_S = 0.5
BANNER_S = 3.0


class GuestNow(NamedTuple):
    """A running guest. `boots` is True in the first BOOT_S after the start of the guest."""

    machine: Machine
    boots: bool


Guest = Callable[[], GuestNow]
"""Returns the present guest. Raises VirtbusError 404, 409 `not_running`."""


class GuestCommands:
    """Commands in the guests of this node. Each VM runs one ExecSync at a time."""

    def __init__(self, link: BusLink, shell: GuestShell, node: str) -> None:
        self._link = link
        self._shell = shell
        self._node = node
        self._queues = KeyedLock()

    async def run(self, guest: Guest, words: tuple[str, ...], timeout_s: float) -> Outcome:
        """Run a command without input; `timeout_s` 0 means the longest limit, EXEC_S.

        Raises:
            VirtbusError: 422 `no_shell`: neither the guest agent nor SSH can run the command. 503
                `bus_away`, `agent_silent`: kubelet does not count these as a failed probe. 504
                `exec_timeout`: the command did not end in time. The errors of `agent.exec`.
        """
        limit_s = min(timeout_s or EXEC_S, EXEC_S)
        uid = guest().machine.uid
        try:
            async with asyncio.timeout(limit_s) as limit, self._queues.of(uid):
                loop = asyncio.get_running_loop()
                until_s = limit.when() or loop.time()
                limit.reschedule(until_s + ANSWER_S + SLACK_S)
                try:
                    return await self._by_agent(uid, words, until_s - loop.time())
                except VirtbusError as error:
                    if error.reason not in NO_AGENT:
                        raise
                    refusal = error
                limit.reschedule(until_s)
                try:
                    await self._booted(guest, until_s)
                    return await self._by_shell(guest().machine, words)
                except VirtbusError as error:
                    if error.reason != "no_shell":
                        raise
                    if refusal.reason == "bus_away":
                        raise refusal from error
                    raise _neither(refusal, error) from error
        except TimeoutError:
            message = f"the command did not end within {limit_s:g} s"
            raise VirtbusError(Code.DEADLINE, "exec_timeout", message) from None

    async def _booted(self, guest: Guest, until_s: float) -> None:
        """Wait for the SSH server of a guest that may still boot, until shortly before `until_s`.

        Raises:
            VirtbusError: 422 `no_shell`. kubelet does not count this error as a failed probe.
        """
        loop = asyncio.get_running_loop()
        while (now := guest()).boots:
            left_s = until_s - loop.time() - SLACK_S
            try:
                await self._shell.check(reachable(now.machine)[0], max(0.0, min(BANNER_S, left_s)))
            except VirtbusError:
                if left_s < LOOK_S:
                    raise
            else:
                return
            await asyncio.sleep(LOOK_S)

    async def _by_agent(self, uid: str, words: tuple[str, ...], limit_s: float) -> Outcome:
        limit_s = min(max(1.0, limit_s), EXEC_S)
        want = validate(GuestExec, {"uid": uid, "words": words, "timeout_s": limit_s})
        subject = subjects.rpc(self._node, "agent", "exec")
        try:
            answer = await self._link.here().request(
                subject, want, timeout_s=want.timeout_s + ANSWER_S
            )
        except OutcomeUnknownError as error:
            # UNAVAILABLE, because kubelet counts DEADLINE_EXCEEDED as a failed probe.
            message = f"the node's agent did not answer: {error}"
            raise VirtbusError(Code.UNAVAILABLE, "agent_silent", message) from error
        except BusError as error:
            raise away(str(error)) from error
        done = validate(GuestExecuted, answer)
        return Outcome(done.exit_code, done.stdout, done.stderr)

    async def _by_shell(self, machine: Machine, words: tuple[str, ...]) -> Outcome:
        address, key = reachable(machine)
        return await self._shell.collected(address, key, words, EXEC_OUTPUT_BYTES)

    async def check(self, guest: Guest, wait_s: float) -> None:
        """Wait until SSH can run a command. Wait at most `wait_s` for a guest that may still boot.

        Raises:
            VirtbusError: 422 `no_shell`.
        """
        await self._booted(guest, asyncio.get_running_loop().time() + wait_s)
        await self._shell.check(reachable(guest().machine)[0], BANNER_S)

    async def interactive(
        self, machine: Machine, words: tuple[str, ...], wanted: Wanted, pipes: Mapping[str, Pipe]
    ) -> int:
        """Run a command with a client's streams; return its exit code.

        Raises:
            VirtbusError: 422 `no_shell`; 503 `shell_lost`.
        """
        return await self._shell.interactive(*reachable(machine), words, wanted, pipes)


def _neither(refusal: VirtbusError, error: VirtbusError) -> VirtbusError:
    return VirtbusError(Code.UNSUPPORTED, "no_shell", f"{refusal}; {error}")


def reachable(machine: Machine) -> tuple[str, ShellKey]:
    """Return the address and the key of a guest.

    Raises VirtbusError 422 `no_shell`.
    """
    if machine.addresses and machine.key.private:
        return machine.addresses[0], machine.key
    what = "an address yet" if machine.key.private else "a key; create the pod again"
    raise VirtbusError(Code.UNSUPPORTED, "no_shell", f"exec: the guest does not have {what}")
