"""A VirtualMachine: keeps an instance of its template, as its run strategy says."""

from virtbus.kubebridge.core.kubevirt.datavolumes import DataVolumeTemplate
from virtbus.kubebridge.core.kubevirt.devices import Disk
from virtbus.kubebridge.core.kubevirt.instance import InstanceSpec
from virtbus.kubebridge.core.kubevirt.instance_status import ChangedBlockTracking
from virtbus.kubebridge.core.kubevirt.machine import Condition
from virtbus.kubebridge.core.kubevirt.migrations import MigratedVolume
from virtbus.kubebridge.core.kubevirt.part import Int64, Metadata, Part, Time, must, said
from virtbus.kubebridge.core.kubevirt.pods import ATOMIC
from virtbus.kubebridge.core.kubevirt.volumes import Claim, DataVolumeVolume


class Matcher(Part):
    """An instance type or preference."""

    inferFromVolume: str | None = said("The volume that names it.")
    inferFromVolumeFailurePolicy: str | None = said("Reject (the default) or Ignore.")
    kind: str | None = said("Its kind; by default the cluster-wide one.")
    name: str | None = said("Its name.")
    revisionName: str | None = said("This very revision of it.")


class Template(Part):
    """What instances are made of."""

    metadata: Metadata | None = said("Their labels and annotations.", nullable=True)
    spec: InstanceSpec = must("What they are.")


class MachineSpec(Part):
    """What shall run, and when."""

    dataVolumeTemplates: list[DataVolumeTemplate] | None = said(
        "DataVolumes that are made with it.", nullable=True
    )
    instancetype: Matcher | None = said("Where its CPUs and memory come from.")
    preference: Matcher | None = said("Where its devices' kinds come from.")
    runStrategy: str | None = said("Always, RerunOnFailure, Once, Manual or Halted.")
    running: bool | None = said("Of old: true is Always, false is Halted.")
    template: Template = must("What its instances are made of.")
    updateVolumesStrategy: str | None = said("Replacement (the default) or Migration.")


class RevisionReference(Part):
    """A ControllerRevision."""

    name: str | None = said("Its name.")


class MatcherStatus(Part):
    """An instance type or preference as it was found."""

    controllerRevisionRef: RevisionReference | None = said("The revision.")
    inferFromVolume: str | None = said("The volume that named it.")
    inferFromVolumeFailurePolicy: str | None = said("Reject or Ignore.")
    kind: str | None = said("Its kind.")
    name: str | None = said("Its name.")


class MemoryDumpRequest(Part):
    """A dump of the guest's memory."""

    claimName: str = must("The claim.")
    endTimestamp: Time | None = said("When it ended.")
    fileName: str | None = said("The file.")
    message: str | None = said("Why it failed.")
    phase: str = must("How far it is.")
    remove: bool | None = said("It shall go.")
    startTimestamp: Time | None = said("When it began.")


class StartFailure(Part):
    """Starts that failed in a row."""

    consecutiveFailCount: int | None = said("How many.")
    lastFailedVMIUID: str | None = said("The last one.")
    retryAfterTimestamp: Time | None = said("When the next is.")


class StateChangeRequest(Part):
    """What is to be done next."""

    action: str = must("Start or Stop.")
    data: dict[str, str] | None = said("How: paused.")
    uid: str | None = said("With which instance.")


class HotplugSource(Part):
    """A volume to plug in."""

    dataVolume: DataVolumeVolume | None = said("A DataVolume.")
    persistentVolumeClaim: Claim | None = said("A claim.")


class AddVolume(Part):
    """A volume to plug in."""

    disk: Disk = must("Its disk.")
    dryRun: list[str] | None = said("All: only say whether it would be done.", **ATOMIC)
    name: str = must("Its name.")
    volumeSource: HotplugSource = must("What it is.")


class RemoveVolume(Part):
    """A volume to unplug."""

    dryRun: list[str] | None = said("All: only say whether it would be done.", **ATOMIC)
    name: str = must("Its name.")


class VolumeRequest(Part):
    """A volume to plug in or to unplug."""

    addVolumeOptions: AddVolume | None = said("Plug it in.")
    removeVolumeOptions: RemoveVolume | None = said("Unplug it.")


class VolumeSnapshotStatus(Part):
    """Whether a volume can be snapshot."""

    enabled: bool = must("It can.")
    name: str = must("Which.")
    reason: str | None = said("Why not.")


class VolumeMigrationState(Part):
    """Volumes that move."""

    migratedVolumes: list[MigratedVolume] | None = said("Which.", **ATOMIC)


class VolumeUpdateState(Part):
    """Volumes that are exchanged."""

    volumeMigrationState: VolumeMigrationState | None = said("By a move.")


class MachineStatus(Part):
    """How it is; written by virtbus."""

    changedBlockTracking: ChangedBlockTracking | None = said(
        "Whether changed blocks are noted.", nullable=True
    )
    conditions: list[Condition] | None = said("Ready, Paused, RestartRequired, ...")
    created: bool | None = said("Its instance is there.")
    desiredGeneration: Int64 | None = said("The generation that shall run.")
    instancetypeRef: MatcherStatus | None = said("Its instance type.", nullable=True)
    memoryDumpRequest: MemoryDumpRequest | None = said("A dump of memory.", nullable=True)
    observedGeneration: Int64 | None = said("The generation that runs.")
    preferenceRef: MatcherStatus | None = said("Its preference.", nullable=True)
    printableStatus: str | None = said(
        "In a word: Stopped, Starting, Running, ...", default="Stopped"
    )
    ready: bool | None = said("Its guest runs.")
    restoreInProgress: str | None = said("The restore under way.")
    runStrategy: str | None = said("As last acted on.")
    snapshotInProgress: str | None = said("The snapshot under way.")
    startFailure: StartFailure | None = said("Starts that failed in a row.", nullable=True)
    stateChangeRequests: list[StateChangeRequest] | None = said("What is to be done next.")
    volumeRequests: list[VolumeRequest] | None = said("Volumes to plug in or unplug.", **ATOMIC)
    volumeSnapshotStatuses: list[VolumeSnapshotStatus] | None = said("What can be snapshot.")
    volumeUpdateState: VolumeUpdateState | None = said("Volumes that are exchanged.")


class VirtualMachine(Part):
    """A machine that is started, stopped and started again."""

    spec: MachineSpec = must("What shall run, and when.")
    status: MachineStatus | None = said("How it is; written by virtbus.")
