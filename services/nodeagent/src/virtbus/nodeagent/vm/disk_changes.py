"""Changes the disks of a running guest as the record of its VM says, until both agree."""

from collections.abc import Callable

from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.vm.operations.drives import set_drives
from virtbus.nodeagent.vm.operations.limits import limit
from virtbus.nodeagent.vm.operations.outcome import RETRY_S
from virtbus.nodeagent.vm.operations.plug import change_disks
from virtbus.nodeagent.vm.state import ActorState
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.vm import VmRecord


async def keep_disks(vm: ActorState, tools: AgentPorts, report: Callable[[], None]) -> None:
    """Attach, detach and grow disks until the guest has those of the latest record.

    The status shows what waits.
    """
    delay_s = RETRY_S[0]
    while True:
        vm.disks_changed.clear()
        record, before = vm.record, vm.observed.disks
        found = vm.observed.disks = await change_disks(record, vm.image, tools, before)
        if found != before:
            report()
        if not found.pending and record is vm.record:
            return
        if await wait_for_event(vm.disks_changed, 0 if record is not vm.record else delay_s):
            delay_s = RETRY_S[0]
        else:
            delay_s = min(delay_s * 2, RETRY_S[1])


async def set_limits(vm: ActorState, tools: AgentPorts, record: VmRecord) -> None:
    """Set the limits of the disks in the guest; raises VirtbusError."""
    vm.observed.disk_limits = await limit(record, tools.hypervisor, vm.observed.disks)


async def change_media(vm: ActorState, tools: AgentPorts, record: VmRecord) -> None:
    """Eject and insert media; raises VirtbusError, which the status shows."""
    try:
        await set_drives(record, vm.image, tools, vm.observed.disks.addresses)
    except VirtbusError as error:
        vm.observed.drives_error = error.body
        raise
    vm.observed.drives_error = None
