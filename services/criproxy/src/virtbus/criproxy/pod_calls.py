"""Passes the calls about one sandbox or container to the runtime of this object."""

from virtbus.bus.runtime.sources import Sources
from virtbus.criproxy.core import calls, routing
from virtbus.criproxy.core.calls import ById
from virtbus.criproxy.core.entries import Entry
from virtbus.criproxy.edge import messages
from virtbus.criproxy.edge.grpc_server import Call
from virtbus.criproxy.memory import Memory
from virtbus.criproxy.owners import Owners
from virtbus.criproxy.runtimes import NodeRuntime, Runtimes
from virtbus.schemas.errors import Code, VirtbusError


class PodCalls:
    """The handlers of RunPodSandbox and of the calls with an id."""

    def __init__(
        self,
        runtimes: Runtimes,
        owners: Owners,
        memory: Memory,
        vm_handlers: tuple[str, ...],
        sources: Sources,
    ) -> None:
        self._runtimes = runtimes
        self._owners = owners
        self._memory = memory
        self._vm_handlers = vm_handlers
        self._sources = sources

    async def run(self, call: Call) -> bytes:
        """Pass RunPodSandbox to the runtime that the RuntimeClass or annotation determines.

        The new sandbox is added to the runtime's last list before the client gets the answer, so
        that no later list lacks the sandbox.

        Raises:
            VirtbusError: 400 `runtime_unknown`, `runtime_unclear`, `request_unreadable`.
            CallFailedError: the error of the runtime.
        """
        asked = messages.asked_pod(call.body)
        runtime = self._runtimes.named(routing.runtime_of_pod(asked, self._vm_handlers))
        with runtime.changing():
            answer = await runtime.passed(call)
            made = messages.new_sandbox(call.body, answer, self._sources.time_ns())
            await _add(runtime, calls.LIST["sandbox"], made)
        return answer

    async def by_id(self, call: Call) -> bytes:
        """Pass a call to the runtime that has its sandbox or container.

        Raises:
            VirtbusError: 400 `id_missing`, `image_of_other_runtime`, `request_unreadable`. 503
                `list_unknown`, `status_unknown`.
            CallFailedError: the error of the runtime.
        """
        rule = calls.BY_ID[call.name]
        key = messages.asked_id(call.name, rule.field, call.body)
        runtime = await self._owners.find(rule.of, key)
        if call.name == calls.STATUS[rule.of]:
            return await self._status(runtime, call, rule, key)
        match rule.effect:
            case "adds":
                return await self._create(runtime, call)
            case "removes":
                with runtime.changing():
                    answer = await runtime.passed(call)
                    await runtime.forget(rule.of, key)
                self._owners.removed(key, runtime)
                return answer
            case "changes":
                answer = await runtime.passed(call)
                self._memory.of_change(runtime, rule.of, rule.field, key)
                return answer
            case "":
                return await runtime.passed(call)

    async def _create(self, runtime: NodeRuntime, call: Call) -> bytes:
        routing.check_image(messages.asked_container(call.body).image, runtime.name)
        with runtime.changing():
            answer = await runtime.passed(call)
            made = messages.new_container(call.body, answer, self._sources.time_ns())
            await _add(runtime, calls.LIST["container"], made)
        return answer

    async def _status(self, runtime: NodeRuntime, call: Call, rule: ById, key: str) -> bytes:
        """Return a status; while the runtime is away, the last known status, marked as stale."""
        answer = await runtime.told(call)
        if answer is not None:
            self._memory.of_status(runtime, rule.of, answer)
            return answer
        last = runtime.last[call.name].all.get(key)
        if last is None:
            message = f"{runtime.away}, and no status of {key:.80} is known; repeat the call later"
            raise VirtbusError(Code.UNAVAILABLE, "status_unknown", message)
        return messages.stale(call.name, last, runtime.away)


async def _add(runtime: NodeRuntime, call: str, made: Entry) -> None:
    """Add a new sandbox or container to a list. A repeated call may have added the entry before."""
    if made.key not in runtime.entries(call):
        await runtime.last[call].put(made)
