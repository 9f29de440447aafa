"""Sets the limits of a running domain on its host: CPU shares, quota, CPUs, and memory.

libvirt writes shares and quota to the guest's cgroup, pins the guest's threads to the CPUs, and
sets the target of the guest's memory balloon.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import libvirt

from virtbus.nodeagent.core import resource_values
from virtbus.nodeagent.core.resource_values import InForce, ResourcesSet
from virtbus.nodeagent.edge.libvirt_errors import is_down, translated
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.resources import NO_LIMITS, Resources, ResourcesInForce, cpu_list, cpu_numbers

_LIVE = libvirt.VIR_DOMAIN_AFFECT_LIVE
_UNIFIED = Path("/sys/fs/cgroup/cgroup.controllers")
"""This file exists on hosts with cgroup v2, whose weights differ from shares."""
DOING = "set the resources"


def set_resources(wanted: Resources, domain: libvirt.virDomain) -> ResourcesSet:
    """Set the limits that differ from `wanted`; do nothing if no guest runs.

    Each function in `_PARTS` sets some of the limits. Return the limits in force afterwards, and
    one of the errors of the functions. If the host does not support a limit, that is an error only
    if the record sets the limit.
    """
    if not domain.isActive():
        return ResourcesSet(None)
    told: InForce = {}
    errors: list[VirtbusError] = []
    for part, fields in _PARTS.items():
        try:
            for values in part(wanted, domain):
                told |= values
        except VirtbusError as error:
            errors.append(error)
        except libvirt.libvirtError as error:
            if is_down(error) or not domain.isActive():
                raise
            problem = _problem(part, error)
            if problem.code != Code.UNSUPPORTED or _asked(wanted, fields):
                errors.append(problem)
    in_force = ResourcesInForce.model_validate(told)
    return ResourcesSet(in_force, resource_values.first_to_repeat(errors))


def pretended_resources(wanted: Resources, domain: libvirt.virDomain) -> ResourcesSet:
    """Return `wanted` as the limits in force, for a simulated guest, and set nothing."""
    in_force = ResourcesInForce(**wanted.model_dump()) if domain.isActive() else None
    return ResourcesSet(in_force)


def _scheduler(wanted: Resources, domain: libvirt.virDomain) -> Iterator[InForce]:
    unified = _UNIFIED.exists()
    figures = resource_values.scheduler(wanted, unified=unified)
    found = domain.schedulerParametersFlags(_LIVE)
    yield resource_values.in_force(found, wanted, unified=unified)
    if changes := resource_values.different(found, figures):
        for step in changes:
            domain.setSchedulerParametersFlags(dict(step), _LIVE)
        found = domain.schedulerParametersFlags(_LIVE)
        yield resource_values.in_force(found, wanted, unified=unified)


def _pin(wanted: Resources, domain: libvirt.virDomain) -> Iterator[InForce]:
    """Pin the guest's threads to CPUs; yield the CPUs in force before and afterwards.

    Raises VirtbusError 422 `no_such_cpu` if a wanted CPU is not online on the host.
    """
    online = _set(domain.connect().getCPUMap()[1])
    numbers = online if wanted.cpus is None else cpu_numbers(wanted.cpus)
    pinned = _pinned(domain)
    yield _cpus(wanted, numbers, pinned)
    if missing := numbers - online:
        message = f"the host has no online CPU {cpu_list(missing)}; give CPUs of {cpu_list(online)}"
        raise VirtbusError(Code.UNSUPPORTED, "no_such_cpu", message)
    if pinned != {numbers}:
        mask = tuple(number in numbers for number in range(max(online) + 1))
        for vcpu in range(len(domain.vcpuPinInfo(_LIVE))):
            domain.pinVcpuFlags(vcpu, mask, _LIVE)
        domain.pinEmulator(mask, _LIVE)
        for thread, _ in domain.ioThreadInfo(_LIVE):
            domain.pinIOThread(thread, mask, _LIVE)
        yield _cpus(wanted, numbers, _pinned(domain))


def _cpus(wanted: Resources, numbers: frozenset[int], pinned: set[frozenset[int]]) -> InForce:
    together = frozenset[int]().union(*pinned)
    return {"cpus": wanted.cpus if together == numbers else cpu_list(together)}


def _pinned(domain: libvirt.virDomain) -> set[frozenset[int]]:
    threads = [mask for _, mask in domain.ioThreadInfo(_LIVE)]
    masks = [*domain.vcpuPinInfo(_LIVE), domain.emulatorPinInfo(_LIVE), *threads]
    return {_set(mask) for mask in masks}


def _set(mask: Sequence[bool]) -> frozenset[int]:
    return frozenset(number for number, on in enumerate(mask) if on)


def _balloon(wanted: Resources, domain: libvirt.virDomain) -> Iterator[InForce]:
    """Set the target of the guest's balloon; yield the guest's memory before and afterwards.

    The memory is None if no limit is wanted and the guest has all its memory.
    """
    _, most_kib, actual_kib, *_ = domain.info()
    target_kib = resource_values.balloon_kib(wanted.memory_bytes, most_kib)

    def told() -> InForce:
        near = resource_values.near(actual_kib, target_kib)
        return {"memory_bytes": wanted.memory_bytes if near else int(actual_kib) * 1024}

    yield told()
    if not resource_values.near(actual_kib, target_kib):
        domain.setMemoryFlags(target_kib, _LIVE)
        _, _, actual_kib, *_ = domain.info()
        yield told()


Part = Callable[[Resources, libvirt.virDomain], Iterator[InForce]]
_PARTS: dict[Part, set[str]] = {
    _scheduler: {"cpu_shares", "cpu_quota_us", "cpu_period_us"},
    _pin: {"cpus"},
    _balloon: {"memory_bytes"},
}
"""The fields of `Resources` that each function sets. The functions do not depend on each other."""


def _asked(wanted: Resources, fields: set[str]) -> bool:
    return any(getattr(wanted, name) != getattr(NO_LIMITS, name) for name in fields)


def _problem(part: Part, error: libvirt.libvirtError) -> VirtbusError:
    """Return libvirt's error of a function in `_PARTS` as a VirtbusError.

    libvirt calls a change an "invalid operation" if the host has no such cgroup, or the emulator
    has no vCPU threads. For shares, quota and CPUs, this error becomes 422 `domain_unsupported`.
    """
    found = translated(error, DOING)
    absent = error.get_error_code() == libvirt.VIR_ERR_OPERATION_INVALID
    if absent and part is not _balloon:
        return VirtbusError(Code.UNSUPPORTED, "domain_unsupported", found.body.message)
    return found
