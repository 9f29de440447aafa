"""How a VirtualMachineInstance is."""

from virtbus.kubebridge.core.kubevirt.machine import Condition, CpuTopology, Machine
from virtbus.kubebridge.core.kubevirt.migrations import ClaimInfo, MigratedVolume, MigrationState
from virtbus.kubebridge.core.kubevirt.part import (
    Int32,
    Int64,
    Part,
    Quantity,
    Time,
    UInt32,
    must,
    said,
)
from virtbus.kubebridge.core.kubevirt.pods import ATOMIC


class BackupVolume(Part):
    """A volume in a backup."""

    volumeName: str = must("Which.")


class BackupStatus(Part):
    """How the last backup went."""

    backupMsg: str | None = said("What was said.")
    backupName: str | None = said("Its name.")
    checkpointName: str | None = said("Its checkpoint.")
    completed: bool | None = said("It is over.")
    endTimestamp: Time | None = said("When it ended.")
    failed: bool | None = said("It failed.")
    quiesceStatus: str | None = said("Whether the guest held still.")
    startTimestamp: Time | None = said("When it began.")
    volumes: list[BackupVolume] | None = said("Which volumes.", **ATOMIC)


class ChangedBlockTracking(Part):
    """Whether changed blocks are noted."""

    backupStatus: BackupStatus | None = said("How the last backup went.", nullable=True)
    state: str = must("Enabled, Disabled, or on the way.")


class GuestOsInfo(Part):
    """The guest's system, by its agent."""

    id: str | None = said("Its short name.")
    kernelRelease: str | None = said("The kernel's release.")
    kernelVersion: str | None = said("The kernel's version.")
    machine: str | None = said("The machine's architecture.")
    name: str | None = said("Its name.")
    prettyName: str | None = said("Its name and version.")
    version: str | None = said("Its version and name.")
    versionId: str | None = said("Its version.")


class InterfaceStatus(Part):
    """A network interface as it is."""

    infoSource: str | None = said("Who says so: domain, guest-agent, multus-status.")
    interfaceName: str | None = said("Its name in the guest.")
    ipAddress: str | None = said("Its address.")
    ipAddresses: list[str] | None = said("All its addresses.")
    linkState: str | None = said("up or down.")
    mac: str | None = said("Its MAC address.")
    name: str | None = said("Its name in the spec.")
    podInterfaceName: str | None = said("Its name on the host.")
    queueCount: Int32 | None = said("How many queues it has.")


class Checksum(Part):
    """A file's checksum."""

    checksum: UInt32 | None = said("CRC-32.")


class KernelBootStatus(Part):
    """What was started in place of a boot loader."""

    initrdInfo: Checksum | None = said("The initrd.")
    kernelInfo: Checksum | None = said("The kernel.")


class MemoryStatus(Part):
    """The guest's memory as it is."""

    guestAtBoot: Quantity | None = said("At its start.")
    guestCurrent: Quantity | None = said("Now.")
    guestRequested: Quantity | None = said("As asked for.")
    memoryOverhead: Quantity | None = said("The emulator's own.")


class PhaseTransition(Part):
    """When a phase began."""

    phase: str | None = said("The phase.")
    phaseTransitionTimestamp: Time | None = said("When.")


class TopologyHints(Part):
    """What the node must offer."""

    tscFrequency: Int64 | None = said("Of its TSC, in Hz.")


class HotplugVolumeStatus(Part):
    """A volume that was plugged in."""

    attachPodName: str | None = said("The pod that holds it.")
    attachPodUID: str | None = said("Its uid.")


class MemoryDumpStatus(Part):
    """A dump of the guest's memory."""

    claimName: str | None = said("The claim.")
    endTimestamp: Time | None = said("When it ended.")
    startTimestamp: Time | None = said("When it began.")
    targetFileName: str | None = said("The file.")


class VolumeStatus(Part):
    """A volume as it is."""

    containerDiskVolume: Checksum | None = said("A disk out of a container image.")
    hotplugVolume: HotplugVolumeStatus | None = said("One that was plugged in.")
    memoryDumpVolume: MemoryDumpStatus | None = said("One that holds memory.")
    message: str | None = said("Why, for people.")
    name: str = must("Which.")
    persistentVolumeClaimInfo: ClaimInfo | None = said("Its claim.")
    phase: str | None = said("How far it is.")
    reason: str | None = said("Why, in a word.")
    size: Int64 | None = said("Bytes.")
    target: str = must("Its name in the guest, such as vda.")


class InstanceStatus(Part):
    """How it is, and how it came to be so."""

    VSOCKCID: UInt32 | None = said("Its address for sockets to the host.")
    activePods: dict[str, str] | None = said("Its pods, and their nodes.")
    changedBlockTracking: ChangedBlockTracking | None = said(
        "Whether changed blocks are noted.", nullable=True
    )
    conditions: list[Condition] | None = said("Ready, Paused, AgentConnected, ...")
    currentCPUTopology: CpuTopology | None = said("Its CPUs now.")
    evacuationNodeName: str | None = said("The node that it is to leave.")
    fsFreezeStatus: str | None = said("frozen while its file systems hold still.")
    guestOSInfo: GuestOsInfo | None = said("Its system, by its agent.")
    interfaces: list[InterfaceStatus] | None = said("Its network interfaces.")
    kernelBootStatus: KernelBootStatus | None = said("What was started in place of a boot loader.")
    launcherContainerImageVersion: str | None = said("KubeVirt's launcher; virtbus has none.")
    machine: Machine | None = said("The machine's exact type.")
    memory: MemoryStatus | None = said("Its memory.")
    migratedVolumes: list[MigratedVolume] | None = said("Volumes that move with it.", **ATOMIC)
    migrationMethod: str | None = said("LiveMigration or BlockMigration.")
    migrationState: MigrationState | None = said("How its last move goes.")
    migrationTransport: str | None = said("Unix.")
    nodeName: str | None = said("Where it runs.")
    phase: str | None = said("Pending, Scheduling, Scheduled, Running, Succeeded, Failed, Unknown.")
    phaseTransitionTimestamps: list[PhaseTransition] | None = said(
        "When each phase began.", **ATOMIC
    )
    qosClass: str | None = said("Guaranteed, Burstable or BestEffort.")
    reason: str | None = said("Why it is in its phase.")
    runtimeUser: Int64 | None = said("The emulator's user.")
    selinuxContext: str | None = said("SELinux's context.")
    topologyHints: TopologyHints | None = said("What its node must offer.")
    virtualMachineRevisionName: str | None = said("The revision of its VM.")
    volumeStatus: list[VolumeStatus] | None = said("Its volumes.", **ATOMIC)
