"""Declares the fields of the machine: `spec.domain` without its devices."""

from typing import Any

from virtbus.kubebridge.core.fields.row import Field, FieldType, below, ignored, mapped, refused
from virtbus.kubebridge.core.objects.quantity import whole
from virtbus.schemas.vm import MEMORY_MIN

DOMAIN = "spec.domain"
TO_THREADS = f"{DOMAIN}.io_threads"
TIMERS = "a guest chooses the best timer of the hypervisor; virtbus keeps QEMU's defaults"
WINDOWS = "Hyper-V enlightenments are not supported"
PINNING = "CPUs are not pinned"
UNPINNED = "leave it out: CPUs are shared fairly, up to eight vCPUs for each CPU of the host"
ENCRYPTED = "encrypted guests are not supported"


def memory_bytes(value: Any) -> int:
    """Return the quantity in bytes, at least MEMORY_MIN: a machine does not start with less.

    Raises:
        ValueError: it is not a quantity, it is not positive, or it is larger than 2^63 - 1.
    """
    memory_bytes = whole(value)
    if memory_bytes == 0:
        msg = "must be greater than 0"
        raise ValueError(msg)
    return max(memory_bytes, MEMORY_MIN)


def _count(name: str) -> Field:
    to = f"{DOMAIN}.cpu.{name}"
    return mapped(
        f"domain.cpu.{name}",
        FieldType.NUMBER,
        to,
        "0 counts as missing",
        make=lambda count: count or None,
    )


def _on(path: str, why: str, instead: str) -> Field:
    return mapped(path, FieldType.FLAG, "", why, values=(True,), instead=instead)


def _memory(path: str, why: str) -> Field:
    return mapped(path, FieldType.QUANTITY, f"{DOMAIN}.memory.guest", why, make=memory_bytes)


CPU = (
    below("domain.cpu"),
    _count("sockets"),
    _count("cores"),
    _count("threads"),
    mapped(
        "domain.cpu.model",
        FieldType.TEXT,
        f"{DOMAIN}.cpu.model",
        "host-model and host-passthrough both mean the host's CPU model",
        make=lambda model: None if model in {"host-model", "host-passthrough"} else model,
        pattern=r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}",
        instead="write host-model, host-passthrough or a QEMU model such as Skylake-Client",
    ),
    ignored(
        "domain.cpu.maxSockets",
        "CPUs cannot be hotplugged yet; more sockets need a restart",
    ),
    refused(
        "domain.cpu.features[]",
        "single CPU features cannot be chosen",
        "name a model in domain.cpu.model that has, or lacks, the feature",
    ),
    refused("domain.cpu.dedicatedCpuPlacement", PINNING, UNPINNED),
    refused("domain.cpu.isolateEmulatorThread", PINNING, UNPINNED),
    refused("domain.cpu.numa", "guests have one NUMA cell", "leave it out"),
    refused("domain.cpu.realtime", "CPUs have no real-time scheduling", "leave it out"),
)

MEMORY = (
    below("domain.memory"),
    _memory("domain.memory.guest", "the guest's memory; less than 16Mi becomes 16Mi"),
    ignored(
        "domain.memory.maxGuest",
        "memory cannot be hotplugged yet; more memory needs a restart",
    ),
    refused("domain.memory.hugepages", "memory is not backed by huge pages", "leave it out"),
    ignored(
        "domain.memory.reservedOverhead",
        "it adds to the memory of a pod; virtbus has no pod and computes the overhead itself",
    ),
    below("domain.resources"),
    below("domain.resources.requests"),
    _memory("domain.resources.requests.memory", "the guest's memory if memory.guest is missing"),
    mapped(
        "domain.resources.requests.cpu",
        FieldType.QUANTITY,
        "",
        "rounded up, the number of sockets if no topology is given; placement counts vCPUs",
    ),
    ignored("domain.resources.requests.ephemeral-storage", "disks are counted by their own sizes"),
    below("domain.resources.limits"),
    _memory(
        "domain.resources.limits.memory",
        "the guest's memory if no request is given; a guest never gets more than its memory",
    ),
    mapped(
        "domain.resources.limits.cpu",
        FieldType.QUANTITY,
        "",
        "rounded up, the number of sockets if no topology is given; no guest uses more than its"
        " vCPUs",
    ),
    ignored("domain.resources.limits.ephemeral-storage", "disks are counted by their own sizes"),
    ignored(
        "domain.resources.overcommitGuestOverhead",
        "there is no pod whose overhead could be ignored",
    ),
)

CLOCK = (
    below("domain.clock"),
    below("domain.clock.utc", "the guest's clock is UTC"),
    mapped(
        "domain.clock.utc.offsetSeconds",
        FieldType.NUMBER,
        "",
        "0 only",
        values=(0,),
        instead="leave it out: the clock is UTC",
    ),
    mapped(
        "domain.clock.timezone",
        FieldType.TEXT,
        "",
        "UTC only",
        values=("UTC",),
        instead="leave it out, and set the zone in the guest (cloud-init: `timezone:`)",
    ),
    below("domain.clock.timer"),
    *(ignored(f"domain.clock.timer.{name}", TIMERS) for name in ("hpet", "kvm", "pit", "rtc")),
    ignored("domain.clock.timer.hyperv", TIMERS),
)

FIRMWARE = (
    below("domain.firmware"),
    mapped(
        "domain.firmware.uuid",
        FieldType.TEXT,
        f"{DOMAIN}.firmware.uuid",
        "the UUID that the guest sees; two VMs on a host may have the same",
    ),
    mapped(
        "domain.firmware.serial",
        FieldType.TEXT,
        f"{DOMAIN}.firmware.serial",
        pattern=r"[A-Za-z0-9_.-]{1,64}",
        instead="write 1-64 characters of A-Z, a-z, 0-9, '_', '.' and '-'",
    ),
    below("domain.firmware.bootloader"),
    below("domain.firmware.bootloader.bios", "the firmware is a BIOS"),
    refused(
        "domain.firmware.bootloader.bios.useSerial",
        "the firmware writes no messages",
        "leave it out",
    ),
    refused(
        "domain.firmware.bootloader.efi",
        "the firmware is a BIOS",
        "leave it out, and use an image that boots by BIOS",
    ),
    refused(
        "domain.firmware.kernelBoot",
        "direct kernel boot is not supported",
        "use an image with a boot loader",
    ),
    refused("domain.firmware.acpi", "custom ACPI tables are not supported", "leave it out"),
)


FEATURES = (
    below("domain.features"),
    below("domain.features.acpi"),
    _on("domain.features.acpi.enabled", "always on", "leave it out: a guest has ACPI"),
    below("domain.features.apic"),
    _on("domain.features.apic.enabled", "always on", "leave it out: a guest has an APIC"),
    ignored("domain.features.apic.endOfInterrupt", "QEMU chooses the faster way"),
    ignored("domain.features.smm", "only secure boot needs it, and secure boot is refused"),
    ignored("domain.features.pvspinlock", "a hint that guests do not need"),
    refused("domain.features.kvm", "the hypervisor is not hidden", "leave it out"),
    refused(
        "domain.features.hyperv", WINDOWS, "leave it out: Windows runs without them, but slower"
    ),
    refused("domain.features.hypervPassthrough", WINDOWS, "leave it out"),
)

MACHINE = (
    below("domain"),
    *CPU,
    *MEMORY,
    *CLOCK,
    *FIRMWARE,
    *FEATURES,
    below("domain.machine"),
    mapped(
        "domain.machine.type",
        FieldType.TEXT,
        "",
        "q35, in the version of the node's QEMU",
        make=lambda _: None,  # each node's QEMU uses its own version
        pattern=r"(pc-)?q35(-[A-Za-z0-9.-]{1,40})?",
        instead="write q35",
    ),
    mapped(
        "domain.ioThreadsPolicy",
        FieldType.TEXT,
        f"{TO_THREADS}.policy",
        "threads of virtio disks and of the SCSI controller. A disk uses one thread of the"
        " supplementalPool",
        make=lambda policy: "pool" if policy == "supplementalPool" else policy,
        values=("shared", "auto", "supplementalPool"),
        instead="write shared, auto or supplementalPool",
    ),
    below("domain.ioThreads"),
    mapped(
        "domain.ioThreads.supplementalPoolThreadCount",
        FieldType.NUMBER,
        f"{TO_THREADS}.count",
        "needed for the policy supplementalPool, and only for it; 64 at most",
    ),
    mapped(
        "domain.rebootPolicy",
        FieldType.TEXT,
        "",
        "after a reboot, the guest is still the same VMI",
        values=("Reboot",),
        instead="leave it out: a reboot does not end a VMI",
    ),
    refused("domain.chassis", "the guest sees QEMU's chassis", "leave it out"),
    refused("domain.launchSecurity", ENCRYPTED, "leave it out"),
)
