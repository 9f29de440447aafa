"""Translates a container's resources to the CPUs, the memory and the limits of its VM.

The number of vCPUs and the memory are fixed when the guest starts. The host enforces the limits,
which can change at any time. They are the CPU time, the host's CPUs that the guest may use, and the
memory that the balloon leaves to the guest.
"""

from collections.abc import Iterator, Mapping

from pydantic import ValidationError

from virtbus.cri.core.configs import LinuxResources
from virtbus.cri.core.virtlet import Wishes
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.quantity import parse_bytes
from virtbus.schemas.resources import (
    PERIOD_DEFAULT_US,
    PERIOD_MAX_US,
    PERIOD_MIN_US,
    QUOTA_MAX_US,
    QUOTA_MIN_US,
    SHARES_MAX,
    SHARES_MIN,
    Resources,
    ResourcesInForce,
    cpu_numbers,
)
from virtbus.schemas.vm import CORES_MAX, MEMORY_MAX, MEMORY_MIN, Domain
from virtbus.schemas.wire import reason_of

MEMORY_MAX_NOTE = "virtbus.io/memory-max"
"""The pod's annotation for the maximum to which the memory limit can grow while the guest runs."""
DEFAULT_MEMORY_BYTES = 1024**3
"""The memory of a pod without a memory limit, as in Virtlet."""


def problems(resources: LinuxResources) -> Iterator[Detail]:
    """Yield the problems of resources that no VM can have."""
    size_bytes = resources.memory_limit_in_bytes
    if size_bytes and not MEMORY_MIN <= size_bytes <= MEMORY_MAX:
        message = f"a VM cannot have {size_bytes} bytes of memory; set a limit of at least 16Mi"
        yield Detail(path="linux.resources.memory_limit_in_bytes", message=message)
    if vcpus(resources) > CORES_MAX:
        message = f"a VM has at most {CORES_MAX} vCPUs; lower the CPU limit"
        yield Detail(path="linux.resources.cpu_quota", message=message)
    try:
        Resources(cpus=resources.cpuset_cpus or None)
    except ValidationError as error:
        message = f"cpuset_cpus is no list of CPUs such as 0-3,8 ({reason_of(error)})"
        yield Detail(path="linux.resources.cpuset_cpus", message=message)


def memory_max(notes: Mapping[str, str]) -> tuple[int, list[Detail]]:
    """Return the bytes in the annotation MEMORY_MAX_NOTE, and the problems of the annotation.

    Without a valid annotation, the bytes are 0.
    """
    text = notes.get(MEMORY_MAX_NOTE)
    if text is None:
        return 0, []
    path = f"annotations[{MEMORY_MAX_NOTE}]"
    try:
        found = parse_bytes(text)
    except ValueError as error:
        return 0, [Detail(path=path, message=f"{MEMORY_MAX_NOTE} {reason_of(error)}")]
    if not MEMORY_MIN <= found <= MEMORY_MAX:
        message = f"{MEMORY_MAX_NOTE} must be at least 16Mi; for example 4Gi"
        return 0, [Detail(path=path, message=message)]
    return found, []


def vcpus(resources: LinuxResources) -> int:
    """Return the number of vCPUs: the CPU limit, rounded up, or 1 without a limit."""
    if resources.cpu_quota <= 0 or resources.cpu_period <= 0:
        return 1
    return -(-resources.cpu_quota // resources.cpu_period)


def topology(resources: LinuxResources, wanted: Wishes) -> dict[str, int]:
    """Return the guest's sockets, cores and threads from the annotations, or from the CPU limit."""
    inner = wanted.sockets * wanted.threads
    cores = (wanted.vcpus or vcpus(resources)) // inner
    return {"sockets": wanted.sockets, "cores": cores, "threads": wanted.threads}


def memory_bytes(resources: LinuxResources, notes: Mapping[str, str]) -> int:
    """Return the guest's memory: the larger of the limit and the annotation MEMORY_MAX_NOTE.

    Without a limit, the memory is DEFAULT_MEMORY_BYTES.
    """
    limit = resources.memory_limit_in_bytes
    return max(limit, memory_max(notes)[0]) if limit else DEFAULT_MEMORY_BYTES


def limits(resources: LinuxResources) -> Resources | None:
    """Return the limits that the host is to enforce; None if the container has no limits."""
    given: dict[str, int | str] = {}
    if resources.cpu_shares:
        given["cpu_shares"] = min(max(resources.cpu_shares, SHARES_MIN), SHARES_MAX)
    if resources.cpu_quota > 0:
        period_us = resources.cpu_period or PERIOD_DEFAULT_US
        given["cpu_quota_us"] = min(max(resources.cpu_quota, QUOTA_MIN_US), QUOTA_MAX_US)
        given["cpu_period_us"] = min(max(period_us, PERIOD_MIN_US), PERIOD_MAX_US)
    if resources.cpuset_cpus:
        given["cpus"] = resources.cpuset_cpus
    if resources.memory_limit_in_bytes:
        given["memory_bytes"] = resources.memory_limit_in_bytes
    return Resources.model_validate(given) if given else None


def changed(before: LinuxResources, change: LinuxResources) -> LinuxResources:
    """Return a container's resources after a change. A value of 0 in `change` changes nothing.

    Raises:
        VirtbusError: 400 `pod_refused`: no VM can have these resources.
    """
    given = {name: one for name, one in change.model_dump().items() if one}
    after = before.model_copy(update=given)
    wrong = tuple(problems(after))
    if wrong:
        raise VirtbusError(Code.INVALID, "pod_refused", wrong[0].message, details=wrong)
    return after


def check_running(after: LinuxResources, guest: Domain, *, fixed_cpus: bool) -> None:
    """Refuse resources that a running guest cannot get.

    With `fixed_cpus`, the number of vCPUs does not depend on the CPU limit.

    Raises:
        VirtbusError: 422 `resize_unsupported`. The text names each such resource with a remedy.
    """
    found = []
    if vcpus(after) > guest.cpu.vcpus and not fixed_cpus:
        found.append(
            f"more than its {guest.cpu.vcpus} vCPUs; set the container's resizePolicy of cpu to "
            "RestartContainer, or give later pods more by the annotation VirtletVCPUCount"
        )
    if after.memory_limit_in_bytes > guest.memory.guest:
        found.append(
            f"more than the {guest.memory.guest} bytes of memory that it started with; set the "
            "resizePolicy of memory to RestartContainer, or give later pods the annotation "
            f"{MEMORY_MAX_NOTE}"
        )
    if after.cpuset_mems:
        found.append("memory of other NUMA nodes; run the pod without a topology policy")
    if found:
        message = f"the running guest cannot get {', and '.join(found)}"
        raise VirtbusError(Code.UNSUPPORTED, "resize_unsupported", message)


def reached(wanted: Resources | None, found: ResourcesInForce | None) -> bool:
    """Return True if the limits in force are the wanted limits."""
    plain = ResourcesInForce(**(wanted or Resources()).model_dump())
    return (found or ResourcesInForce()) == plain


def told(
    resources: LinuxResources, found: ResourcesInForce | None, *, waits: bool
) -> LinuxResources:
    """Return a container's resources. A different limit in force replaces a wanted limit.

    `found` is None without a report of the node. Then the wanted limits are returned. `waits` means
    that the node could not set all limits. With `waits`, a missing report means that no limit is in
    force. A limit that is not in force is returned as 0, and a CPU quota as -1.
    """
    wanted = limits(resources)
    if found is None and waits:
        found = ResourcesInForce()
    if found is None or wanted is None or reached(wanted, found):
        return resources
    real: dict[str, int | str] = {}
    if found.cpu_shares != wanted.cpu_shares and wanted.cpu_shares:
        real["cpu_shares"] = found.cpu_shares or 0
    if (found.cpu_quota_us, found.cpu_period_us) != (wanted.cpu_quota_us, wanted.cpu_period_us):
        real |= {"cpu_quota": found.cpu_quota_us or -1, "cpu_period": found.cpu_period_us}
    if _other_cpus(wanted.cpus, found.cpus):
        real["cpuset_cpus"] = found.cpus or ""
    if found.memory_bytes != wanted.memory_bytes:
        real["memory_limit_in_bytes"] = found.memory_bytes or 0
    return resources.model_copy(update=real)


def _other_cpus(wanted: str | None, found: str | None) -> bool:
    return cpu_numbers(wanted or "") != cpu_numbers(found or "")
