"""Sets the limits of a running domain on its host: CPU shares, quota, CPUs, and memory.

libvirt writes the first two into the guest's cgroup, pins its threads, and asks its balloon.
"""

from collections.abc import Sequence
from pathlib import Path

import libvirt

from virtbus.nodeagent.core import resource_values
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.resources import Resources, ResourcesInForce, cpu_list, cpu_numbers

_LIVE = libvirt.VIR_DOMAIN_AFFECT_LIVE
_UNIFIED = Path("/sys/fs/cgroup/cgroup.controllers")
"""This file exists on hosts with cgroup v2, whose weights differ from shares."""


def set_resources(wanted: Resources, domain: libvirt.virDomain) -> ResourcesInForce | None:
    """Set those limits that differ; return all limits afterwards, None if no guest runs."""
    if not domain.isActive():
        return None
    unified = _UNIFIED.exists()
    figures = resource_values.scheduler(wanted, unified=unified)
    found = domain.schedulerParametersFlags(_LIVE)
    if changes := resource_values.different(found, figures):
        for part in changes:
            domain.setSchedulerParametersFlags(dict(part), _LIVE)
        found = domain.schedulerParametersFlags(_LIVE)
    told = resource_values.in_force(found, wanted, unified=unified)
    cpus, memory_bytes = _pin(wanted.cpus, domain), _balloon(wanted.memory_bytes, domain)
    return told.model_copy(update={"cpus": cpus, "memory_bytes": memory_bytes})


def pretended_resources(wanted: Resources, domain: libvirt.virDomain) -> ResourcesInForce | None:
    """Return the limits of a domain that has no guest."""
    return ResourcesInForce(**wanted.model_dump()) if domain.isActive() else None


def _pin(wanted: str | None, domain: libvirt.virDomain) -> str | None:
    """Pin the guest's threads to CPUs, None: to all; return the CPUs in force."""
    online = _set(domain.connect().getCPUMap()[1])
    numbers = online if wanted is None else cpu_numbers(wanted)
    if missing := numbers - online:
        message = f"the host has no online CPU {cpu_list(missing)}; give CPUs of {cpu_list(online)}"
        raise VirtbusError(Code.UNSUPPORTED, "no_such_cpu", message)
    if _pinned(domain) != {numbers}:
        mask = tuple(number in numbers for number in range(max(online) + 1))
        for vcpu in range(len(domain.vcpuPinInfo(_LIVE))):
            domain.pinVcpuFlags(vcpu, mask, _LIVE)
        domain.pinEmulator(mask, _LIVE)
        for thread, _ in domain.ioThreadInfo(_LIVE):
            domain.pinIOThread(thread, mask, _LIVE)
    pinned = frozenset[int]().union(*_pinned(domain))
    return wanted if pinned == numbers else cpu_list(pinned)


def _pinned(domain: libvirt.virDomain) -> set[frozenset[int]]:
    """Return the sets of CPUs that the vCPUs, the emulator and the IO threads may use."""
    threads = [mask for _, mask in domain.ioThreadInfo(_LIVE)]
    masks = [*domain.vcpuPinInfo(_LIVE), domain.emulatorPinInfo(_LIVE), *threads]
    return {_set(mask) for mask in masks}


def _set(mask: Sequence[bool]) -> frozenset[int]:
    return frozenset(number for number, on in enumerate(mask) if on)


def _balloon(wanted_bytes: int | None, domain: libvirt.virDomain) -> int | None:
    """Ask the guest's balloon for a size; return the guest's memory, None: it has all of it."""
    _, most_kib, actual_kib, *_ = domain.info()
    target_kib = resource_values.balloon_kib(wanted_bytes, most_kib)
    if not resource_values.near(actual_kib, target_kib):
        domain.setMemoryFlags(target_kib, _LIVE)
        _, most_kib, actual_kib, *_ = domain.info()
    if resource_values.near(actual_kib, target_kib):
        return wanted_bytes
    return int(actual_kib) * 1024
