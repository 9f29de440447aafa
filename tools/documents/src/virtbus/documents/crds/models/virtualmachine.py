"""Defines the model of a VirtualMachine, which creates instances by its run strategy."""

from virtbus.documents.crds.models.datavolumes import DataVolumeTemplate
from virtbus.documents.crds.models.devices import Disk
from virtbus.documents.crds.models.instance import InstanceSpec
from virtbus.documents.crds.models.instance_status import ChangedBlockTracking
from virtbus.documents.crds.models.machine import Condition
from virtbus.documents.crds.models.migrations import MigratedVolume
from virtbus.documents.crds.models.part import Int64, Metadata, Part, Time, must, said
from virtbus.documents.crds.models.pods import ATOMIC
from virtbus.documents.crds.models.volumes import Claim, DataVolumeVolume


class Matcher(Part):
    """A reference to an instance type or a preference."""

    inferFromVolume: str | None = said("Name of the volume from which the reference is inferred.")
    inferFromVolumeFailurePolicy: str | None = said(
        "Action if the volume names none: Reject (the default) or Ignore."
    )
    kind: str | None = said("Kind of the reference. The default is the cluster-wide kind.")
    name: str | None = said("Name of the instance type or preference.")
    revisionName: str | None = said("Name of the ControllerRevision that fixes the version.")


class Template(Part):
    """The template of VirtualMachineInstances."""

    metadata: Metadata | None = said("Labels and annotations of the instances.", nullable=True)
    spec: InstanceSpec = must("Specification of the instances.")


class MachineSpec(Part):
    """The specification of a VirtualMachine."""

    dataVolumeTemplates: list[DataVolumeTemplate] | None = said(
        "DataVolumes that are created with the VirtualMachine.", nullable=True
    )
    instancetype: Matcher | None = said("Instance type that gives CPUs and memory.")
    preference: Matcher | None = said("Preference that gives defaults for devices.")
    runStrategy: str | None = said("Run strategy: Always, RerunOnFailure, Once, Manual or Halted.")
    running: bool | None = said(
        "Deprecated; use runStrategy. true means Always, false means Halted."
    )
    template: Template = must("Template of the instances.")
    updateVolumesStrategy: str | None = said(
        "Treatment of changed volumes: Replacement (the default) or Migration."
    )


class RevisionReference(Part):
    """A reference to a ControllerRevision."""

    name: str | None = said("Name of the ControllerRevision.")


class MatcherStatus(Part):
    """The resolved reference to an instance type or a preference."""

    controllerRevisionRef: RevisionReference | None = said("ControllerRevision with its content.")
    inferFromVolume: str | None = said("Name of the volume from which the reference was inferred.")
    inferFromVolumeFailurePolicy: str | None = said(
        "Action if the volume names none: Reject or Ignore."
    )
    kind: str | None = said("Kind of the instance type or preference.")
    name: str | None = said("Name of the instance type or preference.")


class MemoryDumpRequest(Part):
    """A request to dump the guest's memory."""

    claimName: str = must("Name of the PersistentVolumeClaim that receives the dump.")
    endTimestamp: Time | None = said("Time at which the dump ended.")
    fileName: str | None = said("Name of the dump file.")
    message: str | None = said("Explanation of a failure.")
    phase: str = must("Phase of the dump.")
    remove: bool | None = said("If true, the dump is to be detached.")
    startTimestamp: Time | None = said("Time at which the dump started.")


class StartFailure(Part):
    """Failed starts in a row."""

    consecutiveFailCount: int | None = said("Number of failed starts in a row.")
    lastFailedVMIUID: str | None = said("UID of the last instance that failed.")
    retryAfterTimestamp: Time | None = said("Time of the next start.")


class StateChangeRequest(Part):
    """A requested start or stop."""

    action: str = must("Requested action: Start or Stop.")
    data: dict[str, str] | None = said("Parameters of the action, such as paused.")
    uid: str | None = said("UID of the instance to stop.")


class HotplugSource(Part):
    """The source of a hotplugged volume."""

    dataVolume: DataVolumeVolume | None = said("DataVolume to plug in.")
    persistentVolumeClaim: Claim | None = said("PersistentVolumeClaim to plug in.")


class AddVolume(Part):
    """A volume to plug in."""

    disk: Disk = must("Disk that the guest sees.")
    dryRun: list[str] | None = said(
        "The value All checks the request without executing it.", **ATOMIC
    )
    name: str = must("Name of the volume.")
    volumeSource: HotplugSource = must("Source of the volume.")


class RemoveVolume(Part):
    """A volume to unplug."""

    dryRun: list[str] | None = said(
        "The value All checks the request without executing it.", **ATOMIC
    )
    name: str = must("Name of the volume.")


class VolumeRequest(Part):
    """A request to plug in or unplug a volume."""

    addVolumeOptions: AddVolume | None = said("Volume to plug in.")
    removeVolumeOptions: RemoveVolume | None = said("Volume to unplug.")


class VolumeSnapshotStatus(Part):
    """Support for snapshots of a volume."""

    enabled: bool = must("True if the volume supports snapshots.")
    name: str = must("Name of the volume.")
    reason: str | None = said("Reason why the volume does not support snapshots.")


class VolumeMigrationState(Part):
    """Volumes that are being migrated."""

    migratedVolumes: list[MigratedVolume] | None = said(
        "Volumes that are being migrated.", **ATOMIC
    )


class VolumeUpdateState(Part):
    """Volumes that are being replaced."""

    volumeMigrationState: VolumeMigrationState | None = said("State of a migration of volumes.")


class MachineStatus(Part):
    """The observed state of a VirtualMachine. virtbus writes it."""

    changedBlockTracking: ChangedBlockTracking | None = said(
        "State of changed block tracking.", nullable=True
    )
    conditions: list[Condition] | None = said(
        "Conditions such as Ready, Paused and RestartRequired."
    )
    created: bool | None = said("True if the VirtualMachineInstance exists.")
    desiredGeneration: Int64 | None = said("Generation of the spec that is to run.")
    instancetypeRef: MatcherStatus | None = said(
        "Instance type of the VirtualMachine.", nullable=True
    )
    memoryDumpRequest: MemoryDumpRequest | None = said(
        "Last request to dump the guest's memory.", nullable=True
    )
    observedGeneration: Int64 | None = said("Generation of the spec that runs.")
    preferenceRef: MatcherStatus | None = said("Preference of the VirtualMachine.", nullable=True)
    printableStatus: str | None = said(
        "State for people, such as Stopped, Starting or Running.", default="Stopped"
    )
    ready: bool | None = said("True if the guest runs and is ready.")
    restoreInProgress: str | None = said("Name of the restore in progress.")
    runStrategy: str | None = said("Run strategy that was last applied.")
    snapshotInProgress: str | None = said("Name of the snapshot in progress.")
    startFailure: StartFailure | None = said("Failed starts in a row.", nullable=True)
    stateChangeRequests: list[StateChangeRequest] | None = said(
        "Requested starts and stops that are not yet executed."
    )
    volumeRequests: list[VolumeRequest] | None = said(
        "Requests to plug in or unplug volumes.", **ATOMIC
    )
    volumeSnapshotStatuses: list[VolumeSnapshotStatus] | None = said(
        "Support for snapshots of each volume."
    )
    volumeUpdateState: VolumeUpdateState | None = said("Volumes that are being replaced.")


class VirtualMachine(Part):
    """A machine that can be started and stopped many times."""

    spec: MachineSpec = must("Specification of the VirtualMachine.")
    status: MachineStatus | None = said("Observed state. virtbus writes it.")
