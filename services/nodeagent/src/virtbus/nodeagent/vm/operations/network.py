"""Waits until the network of a VM that is off is held or released, as its record says."""

import asyncio
from collections.abc import Callable

from virtbus.bus.runtime.backoff import delays
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.vm.operations.outcome import RETRY_S
from virtbus.nodeagent.vm.state import ActorState
from virtbus.schemas.errors import VirtbusError


async def until_network(vm: ActorState, tools: AgentPorts, report: Callable[[], None]) -> None:
    """Wait until the network is in the state of the record; report each failure and the success."""
    pauses = delays(*RETRY_S, tools.bus.sources)
    after_s = 0.0 if vm.resumed else tools.settings.ask_after_s
    while not vm.net.reached:
        try:
            await vm.net.get(vm.record, ask_after_s=after_s)
        except VirtbusError as error:
            vm.observed.network_error = error.body
            report()
            await asyncio.sleep(next(pauses))
    vm.observed.network_error = None
    report()
