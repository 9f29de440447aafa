"""Brings the devices of a running guest to the state of its record, and notes the new state.

Each function is idempotent. After an error, the caller repeats the function with the latest record.
Only `keep_disks` repeats its steps by itself.
"""

import asyncio
from collections.abc import Callable

from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.resource_values import first_to_repeat
from virtbus.nodeagent.vm.intent import due_links, resources
from virtbus.nodeagent.vm.operations.drives import set_drives
from virtbus.nodeagent.vm.operations.limits import limit
from virtbus.nodeagent.vm.operations.nics import sync_nics
from virtbus.nodeagent.vm.operations.outcome import RETRY_S
from virtbus.nodeagent.vm.operations.plug import change_disks
from virtbus.nodeagent.vm.state import ActorState
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.network import LinkState
from virtbus.schemas.resources import NO_LIMITS, Resources, ResourcesInForce
from virtbus.schemas.vm import VmRecord

BALLOON_S, BALLOON_POLL_S = 1.0, 0.1
"""Seconds to wait for a guest's balloon driver, and seconds between two checks of the balloon."""


async def keep_disks(vm: ActorState, tools: AgentPorts, report: Callable[[], None]) -> None:
    """Attach, detach and grow disks until the guest has the disks of the latest record.

    The status shows the changes that wait.
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
    """Set the limits of the disks. Raises VirtbusError."""
    vm.observed.disk_limits = await limit(record, tools.hypervisor, vm.observed.disks)


async def set_resources(vm: ActorState, tools: AgentPorts, record: VmRecord) -> None:
    """Set the guest's limits on the host. The guest gives memory back if its balloon driver runs.

    Limits that a person has set with libvirt stay if virtbus has set none and the record has none.

    The status shows each error. An error for a limit that this host does not support is not raised.

    Raises:
        VirtbusError: an error of libvirt. 503 `memory_kept`: the guest has not given its memory
            back.
    """
    seen, wanted = vm.observed, resources(record)
    ours = seen.resources_error is not None or seen.resources not in {None, ResourcesInForce()}
    if wanted == NO_LIMITS and not ours:
        return
    try:
        error = await _set_resources(vm, tools, record, wanted)
    except VirtbusError as failure:
        error = failure
    seen.resources_error = error.body if error is not None else None
    if error is not None and error.code != Code.UNSUPPORTED:  # 422: a repetition cannot help
        raise error


async def _set_resources(
    vm: ActorState, tools: AgentPorts, record: VmRecord, wanted: Resources
) -> VirtbusError | None:
    """Set the limits; return one error if any occurred.

    Wait up to BALLOON_S for the balloon, but not again after `memory_kept`.
    """
    seen, loop = vm.observed, asyncio.get_running_loop()
    known = seen.resources_error is not None and seen.resources_error.reason == "memory_kept"
    limit_s = loop.time() + (0 if known else BALLOON_S)
    while True:
        seen.resources, error = await tools.hypervisor.set_resources(record.uid, wanted)
        kept = _memory_kept(wanted, seen.resources) if record is vm.record else None
        if kept is None or loop.time() >= limit_s:
            return first_to_repeat([one for one in (error, kept) if one is not None])
        await asyncio.sleep(BALLOON_POLL_S)


def _memory_kept(wanted: Resources, found: ResourcesInForce | None) -> VirtbusError | None:
    # `found` is None if not read; its `memory_bytes` is None for all of the guest's memory
    if found is None or found.memory_bytes in {None, wanted.memory_bytes}:
        return None
    message = (
        f"the guest still has {found.memory_bytes} bytes of memory; its balloon changes that "
        "with the driver virtio_balloon and free memory"
    )
    return VirtbusError(Code.UNAVAILABLE, "memory_kept", message)


async def change_media(vm: ActorState, tools: AgentPorts, record: VmRecord) -> None:
    """Eject and insert media. Raises VirtbusError, which the status shows until a success."""
    try:
        await set_drives(record, vm.image, tools, vm.observed.disks.addresses)
    except VirtbusError as error:
        vm.observed.drives_error = error.body
        raise
    vm.observed.drives_error = None


async def change_nics(
    vm: ActorState, tools: AgentPorts, record: VmRecord, *, changed: Callable[[], None]
) -> None:
    """Plug and unplug NICs; call `changed` when the guest has the NICs of the record.

    Raises:
        VirtbusError: a NIC is not changed yet. The status shows the error until a success.
        BusError: netd does not answer.
    """
    seen = vm.observed
    try:
        nics, plugged = await sync_nics(record, vm.net, tools)
    except VirtbusError as error:
        seen.nics_error = error.body
        raise
    seen.nics_error, seen.nics = None, nics
    states = {nic.name: nic.state or LinkState.UP for nic in record.spec.domain.devices.interfaces}
    known = {name: state for name, state in seen.links.items() if name in nics}
    seen.links = known | {name: states[name] for name in plugged if name in states}
    changed()


async def set_links(vm: ActorState, tools: AgentPorts) -> None:
    """Set each link that differs from the record, until none does. Raises VirtbusError."""
    seen = vm.observed
    while due := due_links(vm.record, seen.nics, seen.links):
        for device, name, state in due:
            await tools.hypervisor.set_link(vm.record.uid, device, up=state is LinkState.UP)
            seen.links[name] = state
