"""How a move of a running guest goes."""

from typing import Annotated, Literal

from pydantic import Field

from virtbus.kubebridge.core.kubevirt.part import (
    Int32,
    Int64,
    IntOrString,
    Part,
    Quantity,
    Time,
    must,
    said,
)
from virtbus.kubebridge.core.kubevirt.pods import ATOMIC

One32 = Annotated[int, Field(ge=1, json_schema_extra={"format": "int32"})]
One64 = Annotated[int, Field(ge=1, json_schema_extra={"format": "int64"})]
Milliseconds = Annotated[int, Field(ge=1, le=2000000, json_schema_extra={"format": "int64"})]
Percent = Annotated[int, Field(ge=0, le=100, json_schema_extra={"format": "int64"})]
Seconds = Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})]
Overhead = Annotated[str, Field(pattern=r"^(0(?:\.\d{1,3})?|1)$")]


class DowntimeTuning(Part):
    """How the pause at the end grows."""

    cooldownSeconds: One32 | None = said("Between two steps.")
    initialMs: One64 | None = said("At first.")
    startAfterIteration: One64 | None = said("From which round on.")
    steps: One32 | None = said("In how many steps.")


class StallDetector(Part):
    """When a copy no longer gets on."""

    completionTimeoutFactor: IntOrString | None = said("How much longer than reckoned.")
    ewmaAlpha: IntOrString | None = said("The weight of the newest.")
    patienceWindowDecayFactor: IntOrString | None = said("How patience wears off.")
    precopyPossibleFactor: IntOrString | None = said("When copying could still end.")
    searchLocalMinima: bool | None = said("Wait for a quiet moment.")
    stallMargin: Percent | None = said("Percent.")
    stallProgressTimeout: Seconds | None = said("Seconds.")
    switchoverTimeout: Seconds | None = said("Seconds.")


class Experimental(Part):
    """What may change."""

    compression: Literal["none", "zstd"] | None = said("Of what is sent.")
    downtimeTuning: DowntimeTuning | None = said("How the pause grows.")
    stallDetector: StallDetector | None = said("When a copy no longer gets on.")


class MigrationConfiguration(Part):
    """How moves are made."""

    allowAutoConverge: bool | None = said("Slow the guest down until it fits.")
    allowPostCopy: bool | None = said("Run there before all memory is.")
    allowWorkloadDisruption: bool | None = said("Pause the guest where nothing else helps.")
    bandwidthPerMigration: Quantity | None = said("Bytes a second; 0: no bound.")
    completionTimeoutPerGiB: Int64 | None = said("Seconds a GiB until it is given up.")
    disableTLS: bool | None = said("Without TLS.")
    experimental: Experimental | None = said("What may change.")
    matchSELinuxLevelOnMigration: bool | None = said("Keep SELinux's level.")
    maxDowntimeMs: Milliseconds | None = said("How long the guest may pause.")
    network: str | None = said("The network that carries it.")
    nodeDrainTaintKey: str | None = said("The taint of nodes that are emptied.")
    parallelMigrationsPerCluster: Int32 | None = said("At once in the cluster.")
    parallelOutboundMigrationsPerNode: Int32 | None = said("At once from a node.")
    progressTimeout: Int64 | None = said("Seconds without progress until it is given up.")
    unsafeMigrationOverride: bool | None = said("Also where it is not safe.")
    utilityVolumesTimeout: Int64 | None = said("Seconds for utility volumes to go.")


class _End(Part):
    """One end of a move."""

    domainName: str | None = said("The domain there.")
    domainNamespace: str | None = said("The VMI's namespace there.")
    migrationUID: str | None = said("Its migration there.")
    node: str | None = said("The node.")
    persistentStatePVCName: str | None = said("The claim of what persists.")
    pod: str | None = said("The pod.")
    selinuxContext: str | None = said("SELinux's context.")
    syncAddress: str | None = said("Whom to tell.")
    virtualMachineInstanceUID: str | None = said("The VMI there.")


class SourceState(_End):
    """Where it leaves."""

    nodeSelectors: dict[str, str] | None = said("What the other node must have.")


class TargetState(_End):
    """Where it goes."""

    attachmentPodUID: str | None = said("The pod that holds volumes.")
    cpuSet: list[int] | None = said("Its CPUs.", **ATOMIC)
    directMigrationNodePorts: dict[str, int] | None = said("Its ports.")
    domainDetected: bool | None = said("The domain was seen.")
    domainReadyTimestamp: Time | None = said("Since when it is ready.")
    nodeAddress: str | None = said("The node's address.")
    nodeTopology: str | None = said("The node's CPUs.")


class MigrationState(Part):
    """How the last move goes, or went."""

    abortRequested: bool | None = said("It shall end.")
    abortStatus: str | None = said("How its end goes.")
    completed: bool | None = said("It is over.")
    endTimestamp: Time | None = said("When it ended.", nullable=True)
    failed: bool | None = said("It failed.")
    failureReason: str | None = said("Why.")
    migrationConfiguration: MigrationConfiguration | None = said("How it is made.")
    migrationNetworkType: str | None = said("Which network carries it.")
    migrationPolicyName: str | None = said("The policy that matched.")
    migrationUid: str | None = said("Its object.")
    mode: str | None = said("PreCopy, PostCopy or Paused.")
    sourceNode: str | None = said("From where.")
    sourcePersistentStatePVCName: str | None = said("The claim of what persists, there.")
    sourcePod: str | None = said("The pod that is left.")
    sourceState: SourceState | None = said("The end that is left.")
    startTimestamp: Time | None = said("When it began.", nullable=True)
    targetAttachmentPodUID: str | None = said("The pod that holds volumes.")
    targetCPUSet: list[int] | None = said("CPUs there.", **ATOMIC)
    targetDirectMigrationNodePorts: dict[str, int] | None = said("Ports there.")
    targetMemoryOverhead: Quantity | None = said("The emulator's memory there.")
    targetNode: str | None = said("Where to.")
    targetNodeAddress: str | None = said("Its address.")
    targetNodeDomainDetected: bool | None = said("The domain was seen there.")
    targetNodeDomainReadyTimestamp: Time | None = said("Since when it is ready there.")
    targetNodeTopology: str | None = said("CPUs of the node there.")
    targetPersistentStatePVCName: str | None = said("The claim of what persists, there.")
    targetPod: str | None = said("The pod there.")
    targetState: TargetState | None = said("The end where it goes.")


class ClaimInfo(Part):
    """A claim as it is."""

    accessModes: list[str] | None = said("How it may be used.", **ATOMIC)
    capacity: dict[str, Quantity] | None = said("How large it is.")
    claimName: str | None = said("Its name.")
    filesystemOverhead: Overhead | None = said("What its file system takes of it, 0 to 1.")
    preallocated: bool | None = said("All its room is taken.")
    requests: dict[str, Quantity] | None = said("How large it was asked to be.")
    volumeMode: str | None = said("Filesystem or Block.")


class MigratedVolume(Part):
    """A volume that moves."""

    destinationPVCInfo: ClaimInfo | None = said("Where to.")
    sourcePVCInfo: ClaimInfo | None = said("From where.")
    volumeName: str = must("Which.")
