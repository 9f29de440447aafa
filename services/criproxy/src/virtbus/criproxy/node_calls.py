"""Answers the calls about the node: Version, RuntimeConfig, Status, UpdateRuntimeConfig."""

import asyncio

from virtbus.criproxy.core import conditions
from virtbus.criproxy.core.conditions import Seen
from virtbus.criproxy.core.routing import Name
from virtbus.criproxy.edge import messages
from virtbus.criproxy.edge.grpc_server import Call
from virtbus.criproxy.edge.runtime_client import CallFailedError
from virtbus.criproxy.lists import Told, ask_both
from virtbus.criproxy.memory import Memory
from virtbus.criproxy.runtimes import NO_LIST, Runtimes
from virtbus.schemas.errors import Code, VirtbusError


class NodeCalls:
    """The handlers of the calls about the node.

    During a restart of the runtime of containers, Status is refused for up to `grace_s`. A short
    restart then makes no condition false.
    """

    def __init__(self, runtimes: Runtimes, memory: Memory, grace_s: float) -> None:
        self._runtimes = runtimes
        self._memory = memory
        self._grace_s = grace_s

    async def first(self, call: Call) -> bytes:
        """Return the answer of the runtime of containers; while it is away, its last answer.

        Raises:
            VirtbusError: 503 `list_unknown`: the runtime has never answered.
            CallFailedError: the runtime's error.
        """
        runtime = self._runtimes.containers
        answer = await runtime.told(call, NO_LIST)
        if answer is not None:
            self._memory.of_whole(runtime, call.name, answer)
            return answer
        (last,) = runtime.last_list(call.name).values()
        return last.raw

    async def status(self, call: Call) -> bytes:
        """Return the merged status.

        Raises:
            VirtbusError: 503 `runtime_away`: the runtime of containers is away for a moment.
            CallFailedError: the error of a runtime.
        """
        told = await ask_both(self._runtimes, call)
        self._wait_for_restart()
        bodies: dict[Name, bytes] = {}
        seen: dict[Name, Seen] = {}
        for one in told:
            name, body = one.runtime.name, self._body(one, call.name)
            bodies[name] = body
            seen[name] = Seen(messages.conditions(body), one.runtime.away)
        containers, *others = bodies.values()
        return messages.status_answer(containers, others, conditions.merged(seen))

    def _body(self, told: Told, call: str) -> bytes:
        """Return the answer of a runtime; while it is away, its last answer or an empty message."""
        answer = told.answer
        if isinstance(answer, CallFailedError):
            raise answer
        if answer is not None:
            self._memory.of_whole(told.runtime, call, answer)
            return answer
        return b"".join(one.raw for one in told.runtime.entries(call).values())

    def _wait_for_restart(self) -> None:
        """Raise VirtbusError 503 if the runtime of containers is away, for less than `grace_s`.

        kubelet tolerates an error for 30 seconds. A false condition would make the Node NotReady
        at each restart of the runtime.
        """
        runtime = self._runtimes.containers
        away_s = asyncio.get_running_loop().time() - runtime.away_since_s
        if runtime.away and away_s < self._grace_s:
            raise VirtbusError(Code.UNAVAILABLE, "runtime_away", f"{runtime.away}; repeat the call")

    async def update(self, call: Call) -> bytes:
        """Pass UpdateRuntimeConfig to both runtimes.

        After an error, kubelet repeats the call until both runtimes have accepted it.

        Raises:
            CallFailedError: the first error. Both runtimes got the call.
        """
        told = [await self._passed(name, call) for name in ("containers", "vms")]
        for one in told:
            if isinstance(one, CallFailedError):
                raise one
        return b""

    async def _passed(self, name: Name, call: Call) -> bytes | CallFailedError:
        try:
            return await self._runtimes.named(name).passed(call)
        except CallFailedError as error:
            return error
