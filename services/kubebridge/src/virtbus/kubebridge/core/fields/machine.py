"""The machine: `spec.domain` but its devices."""

from typing import Any

from virtbus.kubebridge.core.fields.row import Field, Kind, below, ignored, mapped, refused
from virtbus.kubebridge.core.quantity import whole
from virtbus.schemas.vm import MEMORY_MIN

DOMAIN = "spec.domain"
TIMERS = "a guest takes the best clock of its hypervisor by itself; virtbus leaves the timers so"
WINDOWS = "hints that make Windows faster are not given"
PINNING = "CPUs are not pinned"
UNPINNED = "leave it out: CPUs are shared fairly, up to eight vCPUs for each of the host's"
ENCRYPTED = "encrypted guests are not there"


def some(value: int) -> int | None:
    """A count, or None for KubeVirt's 0: not given."""
    return value or None


def cpu_model(value: str) -> str | None:
    """A named model, or None for what the host offers."""
    return None if value in {"host-model", "host-passthrough"} else value


def memory_bytes(value: Any) -> int:
    """The quantity in bytes, rounded up to the least that a machine starts with."""
    memory_bytes = whole(value)
    if memory_bytes == 0:
        msg = "must be greater than 0"
        raise ValueError(msg)
    return max(memory_bytes, MEMORY_MIN)


def _count(name: str) -> Field:
    to = f"{DOMAIN}.cpu.{name}"
    return mapped(f"domain.cpu.{name}", Kind.NUMBER, to, "0 is the same as not given", make=some)


def _on(path: str, why: str, instead: str) -> Field:
    return mapped(path, Kind.FLAG, "", why, values=(True,), instead=instead)


def _memory(path: str, why: str) -> Field:
    return mapped(path, Kind.QUANTITY, f"{DOMAIN}.memory.guest", why, make=memory_bytes)


CPU = (
    below("domain.cpu"),
    _count("sockets"),
    _count("cores"),
    _count("threads"),
    mapped(
        "domain.cpu.model",
        Kind.TEXT,
        f"{DOMAIN}.cpu.model",
        "host-model and host-passthrough are both what the host offers",
        make=cpu_model,
        pattern=r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}",
        instead="write host-model, host-passthrough or a model of QEMU's such as Skylake-Client",
    ),
    ignored(
        "domain.cpu.maxSockets",
        "room for CPUs plugged in later; until that is there, more sockets ask for a restart",
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
        "room for memory plugged in later; until that is there, more memory asks for a restart",
    ),
    refused(
        "domain.memory.hugepages", "memory is not backed by huge pages of its own", "leave it out"
    ),
    ignored(
        "domain.memory.reservedOverhead",
        "added to what a pod reserves beside the guest; there is no pod, and virtbus knows its own",
    ),
    below("domain.resources"),
    below("domain.resources.requests"),
    _memory("domain.resources.requests.memory", "the guest's memory, without memory.guest"),
    mapped(
        "domain.resources.requests.cpu",
        Kind.QUANTITY,
        "",
        "rounded up, the sockets, without a topology; placement counts vCPUs",
    ),
    ignored("domain.resources.requests.ephemeral-storage", "disks are counted by their own sizes"),
    below("domain.resources.limits"),
    _memory(
        "domain.resources.limits.memory",
        "the guest's memory, without a request; a guest never gets more than its memory",
    ),
    mapped(
        "domain.resources.limits.cpu",
        Kind.QUANTITY,
        "",
        "rounded up, the sockets, without a topology; a guest never uses more than its vCPUs",
    ),
    ignored("domain.resources.limits.ephemeral-storage", "disks are counted by their own sizes"),
    ignored(
        "domain.resources.overcommitGuestOverhead",
        "there is no pod whose overhead could be left uncounted",
    ),
)

CLOCK = (
    below("domain.clock"),
    below("domain.clock.utc", "the guest's clock is UTC"),
    mapped(
        "domain.clock.utc.offsetSeconds",
        Kind.NUMBER,
        "",
        "0 only",
        values=(0,),
        instead="leave it out: the clock is UTC",
    ),
    mapped(
        "domain.clock.timezone",
        Kind.TEXT,
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
        Kind.TEXT,
        f"{DOMAIN}.firmware.uuid",
        "what the guest sees; two VMs of a host may have the same",
    ),
    mapped(
        "domain.firmware.serial",
        Kind.TEXT,
        f"{DOMAIN}.firmware.serial",
        pattern=r"[A-Za-z0-9_.-]{1,64}",
        instead="write 1-64 characters of A-Z, a-z, 0-9, '_', '.' and '-'",
    ),
    below("domain.firmware.bootloader"),
    below("domain.firmware.bootloader.bios", "the firmware is a BIOS"),
    refused("domain.firmware.bootloader.bios.useSerial", "the firmware is silent", "leave it out"),
    refused(
        "domain.firmware.bootloader.efi",
        "the firmware is a BIOS",
        "leave it out, and use an image that boots by BIOS",
    ),
    refused(
        "domain.firmware.kernelBoot",
        "a kernel from outside the disk is not booted",
        "use an image with a boot loader",
    ),
    refused("domain.firmware.acpi", "ACPI tables of one's own are not given", "leave it out"),
)


def _q35(value: Any) -> None:
    """Nothing of it is passed on: each node's QEMU has its own version of it."""


FEATURES = (
    below("domain.features"),
    below("domain.features.acpi"),
    _on("domain.features.acpi.enabled", "it is there", "leave it out: a guest has ACPI"),
    below("domain.features.apic"),
    _on("domain.features.apic.enabled", "it is there", "leave it out: a guest has an APIC"),
    ignored("domain.features.apic.endOfInterrupt", "QEMU chooses the faster way"),
    ignored("domain.features.smm", "only secure boot needs it, which is refused by itself"),
    ignored("domain.features.pvspinlock", "a hint; guests choose by what the hypervisor offers"),
    refused("domain.features.kvm", "the hypervisor is not hidden", "leave it out"),
    refused("domain.features.hyperv", WINDOWS, "leave it out: Windows runs without, slower"),
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
        Kind.TEXT,
        "",
        "q35, in the version of the node's QEMU",
        make=_q35,
        pattern=r"(pc-)?q35(-[A-Za-z0-9.-]{1,40})?",
        instead="write q35",
    ),
    ignored("domain.ioThreadsPolicy", "QEMU's own threads do the disks' work; a matter of speed"),
    ignored("domain.ioThreads", "QEMU's own threads do the disks' work; a matter of speed"),
    mapped(
        "domain.rebootPolicy",
        Kind.TEXT,
        "",
        "a guest that reboots stays the same VMI",
        values=("Reboot",),
        instead="leave it out: a reboot is not an end",
    ),
    refused("domain.chassis", "the guest's chassis is QEMU's", "leave it out"),
    refused("domain.launchSecurity", ENCRYPTED, "leave it out"),
)
