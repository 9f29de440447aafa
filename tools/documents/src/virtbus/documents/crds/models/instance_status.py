"""Defines the model of a VirtualMachineInstance's status."""

from virtbus.documents.crds.models.machine import Condition, CpuTopology, Machine
from virtbus.documents.crds.models.migrations import ClaimInfo, MigratedVolume, MigrationState
from virtbus.documents.crds.models.part import (
    Int32,
    Int64,
    Part,
    Quantity,
    Time,
    UInt32,
    must,
    said,
)
from virtbus.documents.crds.models.pods import ATOMIC


class BackupVolume(Part):
    """A volume in a backup."""

    volumeName: str = must("Name of the volume.")


class BackupStatus(Part):
    """State of the last backup."""

    backupMsg: str | None = said("Message about the backup.")
    backupName: str | None = said("Name of the backup.")
    checkpointName: str | None = said("Name of the checkpoint that the backup created.")
    completed: bool | None = said("True once the backup is over.")
    endTimestamp: Time | None = said("Time at which the backup ended.")
    failed: bool | None = said("True if the backup failed.")
    quiesceStatus: str | None = said(
        "Tells if the guest's file systems were frozen for the backup."
    )
    startTimestamp: Time | None = said("Time at which the backup started.")
    volumes: list[BackupVolume] | None = said("Volumes in the backup.", **ATOMIC)


class ChangedBlockTracking(Part):
    """State of changed block tracking."""

    backupStatus: BackupStatus | None = said("State of the last backup.", nullable=True)
    state: str = must("State of the tracking: Enabled, Disabled, or a state between them.")


class GuestOsInfo(Part):
    """The guest's operating system, as the guest agent reports it."""

    id: str | None = said("Short name of the operating system.")
    kernelRelease: str | None = said("Release of the kernel.")
    kernelVersion: str | None = said("Version of the kernel.")
    machine: str | None = said("CPU architecture of the guest.")
    name: str | None = said("Name of the operating system.")
    prettyName: str | None = said("Name and version of the operating system.")
    version: str | None = said("Version of the operating system, with its code name.")
    versionId: str | None = said("Version number of the operating system.")


class InterfaceStatus(Part):
    """A network interface as it was observed."""

    infoSource: str | None = said(
        "Sources of this information: domain, guest-agent or multus-status."
    )
    interfaceName: str | None = said("Name of the interface in the guest.")
    ipAddress: str | None = said("First IP address of the interface.")
    ipAddresses: list[str] | None = said("All IP addresses of the interface.")
    linkState: str | None = said("State of the link: up or down.")
    mac: str | None = said("MAC address of the interface.")
    name: str | None = said("Name of the interface in the spec.")
    podInterfaceName: str | None = said("Name of the interface on the host.")
    queueCount: Int32 | None = said("Number of queues.")


class Checksum(Part):
    """Checksum of a file."""

    checksum: UInt32 | None = said("CRC-32 checksum.")


class KernelBootStatus(Part):
    """Files of a direct kernel boot."""

    initrdInfo: Checksum | None = said("Checksum of the initrd.")
    kernelInfo: Checksum | None = said("Checksum of the kernel.")


class MemoryStatus(Part):
    """The guest's memory as it was observed."""

    guestAtBoot: Quantity | None = said("Memory of the guest at its start.")
    guestCurrent: Quantity | None = said("Current memory of the guest.")
    guestRequested: Quantity | None = said("Memory that the spec requests.")
    memoryOverhead: Quantity | None = said("Memory of the emulator.")


class PhaseTransition(Part):
    """The start of a phase."""

    phase: str | None = said("Name of the phase.")
    phaseTransitionTimestamp: Time | None = said("Time at which the phase began.")


class TopologyHints(Part):
    """Properties that the node must have."""

    tscFrequency: Int64 | None = said("Frequency of the node's TSC, in Hz.")


class HotplugVolumeStatus(Part):
    """State of a hotplugged volume."""

    attachPodName: str | None = said("Name of the pod that attaches the volume.")
    attachPodUID: str | None = said("UID of the pod that attaches the volume.")


class MemoryDumpStatus(Part):
    """A dump of the guest's memory."""

    claimName: str | None = said("Name of the PersistentVolumeClaim with the dump.")
    endTimestamp: Time | None = said("Time at which the dump ended.")
    startTimestamp: Time | None = said("Time at which the dump started.")
    targetFileName: str | None = said("Name of the dump file.")


class VolumeStatus(Part):
    """A volume as it was observed."""

    containerDiskVolume: Checksum | None = said("Checksum of the container disk.")
    hotplugVolume: HotplugVolumeStatus | None = said("State of a hotplugged volume.")
    memoryDumpVolume: MemoryDumpStatus | None = said("State of a memory dump in this volume.")
    message: str | None = said("Explanation of the phase for people.")
    name: str = must("Name of the volume.")
    persistentVolumeClaimInfo: ClaimInfo | None = said("PersistentVolumeClaim of the volume.")
    phase: str | None = said("Phase of the volume.")
    reason: str | None = said("Reason of the phase, as one word.")
    size: Int64 | None = said("Size in bytes.")
    target: str = must("Name of the disk in the guest, such as vda.")


class InstanceStatus(Part):
    """The observed state of a VirtualMachineInstance."""

    VSOCKCID: UInt32 | None = said("Context id of the guest's VSOCK device.")
    activePods: dict[str, str] | None = said("UIDs of the launcher pods, each with its node.")
    changedBlockTracking: ChangedBlockTracking | None = said(
        "State of changed block tracking.", nullable=True
    )
    conditions: list[Condition] | None = said(
        "Conditions such as Ready, Paused and AgentConnected."
    )
    currentCPUTopology: CpuTopology | None = said("Current CPU topology.")
    evacuationNodeName: str | None = said("Name of the node from which the instance is evacuated.")
    fsFreezeStatus: str | None = said(
        "The value frozen means that the guest's file systems are frozen."
    )
    guestOSInfo: GuestOsInfo | None = said(
        "The guest's operating system, as the guest agent reports it."
    )
    interfaces: list[InterfaceStatus] | None = said("Network interfaces as they were observed.")
    kernelBootStatus: KernelBootStatus | None = said("Files of a direct kernel boot.")
    launcherContainerImageVersion: str | None = said(
        "Version of KubeVirt's launcher image. virtbus has no launcher."
    )
    machine: Machine | None = said("Exact machine type.")
    memory: MemoryStatus | None = said("The guest's memory as it was observed.")
    migratedVolumes: list[MigratedVolume] | None = said(
        "Volumes that are migrated to other PersistentVolumeClaims.", **ATOMIC
    )
    migrationMethod: str | None = said("Method of live migration: LiveMigration or BlockMigration.")
    migrationState: MigrationState | None = said("State of the last migration.")
    migrationTransport: str | None = said("Transport of the migration stream: Unix.")
    nodeName: str | None = said("Name of the node on which the guest runs.")
    phase: str | None = said(
        "Phase: Pending, Scheduling, Scheduled, Running, Succeeded, Failed or Unknown."
    )
    phaseTransitionTimestamps: list[PhaseTransition] | None = said(
        "Times at which the phases began.", **ATOMIC
    )
    qosClass: str | None = said("Quality of service class: Guaranteed, Burstable or BestEffort.")
    reason: str | None = said("Reason of the phase.")
    runtimeUser: Int64 | None = said("User id of the emulator.")
    selinuxContext: str | None = said("SELinux context of the launcher.")
    topologyHints: TopologyHints | None = said("Properties that the node must have.")
    virtualMachineRevisionName: str | None = said(
        "ControllerRevision of the VirtualMachine from which the instance was created."
    )
    volumeStatus: list[VolumeStatus] | None = said("Volumes as they were observed.", **ATOMIC)
