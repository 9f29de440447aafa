"""Defines models of live migration: its configuration and its state."""

from typing import Annotated, Literal

from pydantic import Field

from virtbus.documents.crds.models.part import (
    Int32,
    Int64,
    IntOrString,
    Part,
    Quantity,
    Time,
    must,
    said,
)
from virtbus.documents.crds.models.pods import ATOMIC

One32 = Annotated[int, Field(ge=1, json_schema_extra={"format": "int32"})]
One64 = Annotated[int, Field(ge=1, json_schema_extra={"format": "int64"})]
Milliseconds = Annotated[int, Field(ge=1, le=2000000, json_schema_extra={"format": "int64"})]
Percent = Annotated[int, Field(ge=0, le=100, json_schema_extra={"format": "int64"})]
Seconds = Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})]
Overhead = Annotated[str, Field(pattern=r"^(0(?:\.\d{1,3})?|1)$")]


class DowntimeTuning(Part):
    """Steps in which the allowed downtime of a migration grows."""

    cooldownSeconds: One32 | None = said("Shortest time between two steps, in seconds.")
    initialMs: One64 | None = said("Allowed downtime in the first step, in milliseconds.")
    startAfterIteration: One64 | None = said(
        "Memory copy iteration after which the downtime starts to grow."
    )
    steps: One32 | None = said("Number of steps from the first to the largest downtime.")


class StallDetector(Part):
    """Settings that decide when a memory copy makes no more progress."""

    completionTimeoutFactor: IntOrString | None = said(
        "Factor on the completion timeout that gives the time budget for a forced switchover."
    )
    ewmaAlpha: IntOrString | None = said(
        "Weight of the newest sample in the moving average of the bandwidth."
    )
    patienceWindowDecayFactor: IntOrString | None = said(
        "Factor on the waiting time after each relaxation of the convergence goal."
    )
    precopyPossibleFactor: IntOrString | None = said(
        "Ratio of estimated to allowed downtime up to which pre-copy still switches over."
    )
    searchLocalMinima: bool | None = said(
        "If true, the switchover waits for a moment in which little memory is left to copy."
    )
    stallMargin: Percent | None = said(
        "Change of the remaining memory, in percent, that counts as no progress."
    )
    stallProgressTimeout: Seconds | None = said(
        "Window in seconds without progress after which the migration counts as stalled."
    )
    switchoverTimeout: Seconds | None = said(
        "Seconds that a switchover may take before the migration is aborted."
    )


class Experimental(Part):
    """Experimental migration settings, which may change in any version."""

    compression: Literal["none", "zstd"] | None = said(
        "Compression of the migration stream: none or zstd."
    )
    downtimeTuning: DowntimeTuning | None = said("Steps in which the allowed downtime grows.")
    stallDetector: StallDetector | None = said(
        "Settings that decide when a memory copy makes no more progress."
    )


class MigrationConfiguration(Part):
    """Settings of live migrations."""

    allowAutoConverge: bool | None = said(
        "Slow down the guest's CPUs until the memory copy converges."
    )
    allowPostCopy: bool | None = said(
        "Start the guest on the target before all of its memory is copied."
    )
    allowWorkloadDisruption: bool | None = said(
        "Pause the guest, or use post-copy, if the migration does not converge otherwise."
    )
    bandwidthPerMigration: Quantity | None = said(
        "Bandwidth limit of one migration, in bytes per second. 0 means no limit."
    )
    completionTimeoutPerGiB: Int64 | None = said(
        "Seconds per GiB of memory before the migration is aborted."
    )
    disableTLS: bool | None = said("Send the migration stream without TLS.")
    experimental: Experimental | None = said(
        "Experimental settings, which may change in any version."
    )
    matchSELinuxLevelOnMigration: bool | None = said(
        "Give the target pod the SELinux level of the source pod."
    )
    maxDowntimeMs: Milliseconds | None = said(
        "Longest pause of the guest at the switchover, in milliseconds."
    )
    network: str | None = said(
        "NetworkAttachmentDefinition of the network that carries migration traffic."
    )
    nodeDrainTaintKey: str | None = said("Key of the taint that marks a node as draining.")
    parallelMigrationsPerCluster: Int32 | None = said(
        "Largest number of migrations at the same time in the cluster."
    )
    parallelOutboundMigrationsPerNode: Int32 | None = said(
        "Largest number of migrations at the same time from one node."
    )
    progressTimeout: Int64 | None = said(
        "Seconds without progress before the migration is aborted."
    )
    unsafeMigrationOverride: bool | None = said(
        "Also migrate if the migration is known to be unsafe."
    )
    utilityVolumesTimeout: Int64 | None = said(
        "Seconds to wait until utility volumes are detached, before the migration fails."
    )


class _End(Part):
    """The state of one end of a migration."""

    domainName: str | None = said("Name of the libvirt domain.")
    domainNamespace: str | None = said("Namespace of the VirtualMachineInstance.")
    migrationUID: str | None = said("UID of the migration object.")
    node: str | None = said("Name of the node.")
    persistentStatePVCName: str | None = said(
        "PersistentVolumeClaim with the state of the TPM and the EFI variables."
    )
    pod: str | None = said("Name of the launcher pod.")
    selinuxContext: str | None = said("SELinux context of the launcher.")
    syncAddress: str | None = said("Address at which the two ends synchronize their states.")
    virtualMachineInstanceUID: str | None = said("UID of the VirtualMachineInstance.")


class SourceState(_End):
    """The source of a migration."""

    nodeSelectors: dict[str, str] | None = said("Labels that the target node must have.")


class TargetState(_End):
    """The target of a migration."""

    attachmentPodUID: str | None = said("UID of the pod that holds hotplugged volumes.")
    cpuSet: list[int] | None = said("Host CPUs that are dedicated to the guest.", **ATOMIC)
    directMigrationNodePorts: dict[str, int] | None = said(
        "Ports of the target node for the migration, each with the port that it forwards to."
    )
    domainDetected: bool | None = said("True once the domain is seen on the target.")
    domainReadyTimestamp: Time | None = said("Time at which the domain was ready on the target.")
    nodeAddress: str | None = said("Address of the node.")
    nodeTopology: str | None = said("CPU topology of the node, as JSON.")


class MigrationState(Part):
    """State of the last migration."""

    abortRequested: bool | None = said("True if the migration is to be aborted.")
    abortStatus: str | None = said("Progress of the abort: Aborting, Failed or Succeeded.")
    completed: bool | None = said("True once the migration is over.")
    endTimestamp: Time | None = said("Time at which the migration ended.", nullable=True)
    failed: bool | None = said("True if the migration failed.")
    failureReason: str | None = said("Reason of the failure.")
    migrationConfiguration: MigrationConfiguration | None = said("Settings of this migration.")
    migrationNetworkType: str | None = said(
        "Type of the network that carries the migration: Pod or Migration."
    )
    migrationPolicyName: str | None = said("Name of the MigrationPolicy that applies.")
    migrationUid: str | None = said("UID of the migration object.")
    mode: str | None = said("Mode of the migration: PreCopy, PostCopy or Paused.")
    sourceNode: str | None = said("Name of the source node.")
    sourcePersistentStatePVCName: str | None = said(
        "PersistentVolumeClaim with the persistent state on the source."
    )
    sourcePod: str | None = said("Name of the source pod.")
    sourceState: SourceState | None = said("State of the source.")
    startTimestamp: Time | None = said("Time at which the migration started.", nullable=True)
    targetAttachmentPodUID: str | None = said(
        "UID of the pod that holds hotplugged volumes on the target."
    )
    targetCPUSet: list[int] | None = said(
        "Host CPUs that are dedicated to the guest on the target.", **ATOMIC
    )
    targetDirectMigrationNodePorts: dict[str, int] | None = said(
        "Ports of the target node for the migration, each with the port that it forwards to."
    )
    targetMemoryOverhead: Quantity | None = said("Memory overhead of the target pod.")
    targetNode: str | None = said("Name of the target node.")
    targetNodeAddress: str | None = said("Address of the target node.")
    targetNodeDomainDetected: bool | None = said("True once the domain is seen on the target node.")
    targetNodeDomainReadyTimestamp: Time | None = said(
        "Time at which the domain was ready on the target node."
    )
    targetNodeTopology: str | None = said("CPU topology of the target node, as JSON.")
    targetPersistentStatePVCName: str | None = said(
        "PersistentVolumeClaim with the persistent state on the target."
    )
    targetPod: str | None = said("Name of the target pod.")
    targetState: TargetState | None = said("State of the target.")


class ClaimInfo(Part):
    """A PersistentVolumeClaim as it was observed."""

    accessModes: list[str] | None = said(
        "Access modes of the claim, such as ReadWriteOnce.", **ATOMIC
    )
    capacity: dict[str, Quantity] | None = said("Actual capacity of the claim.")
    claimName: str | None = said("Name of the claim.")
    filesystemOverhead: Overhead | None = said(
        "Share of the capacity that the file system needs, from 0 to 1."
    )
    preallocated: bool | None = said("True if all space of the claim is allocated.")
    requests: dict[str, Quantity] | None = said("Capacity that the claim requests.")
    volumeMode: str | None = said("Volume mode: Filesystem or Block.")


class MigratedVolume(Part):
    """A volume that is migrated to another PersistentVolumeClaim."""

    destinationPVCInfo: ClaimInfo | None = said(
        "PersistentVolumeClaim that the volume is copied to."
    )
    sourcePVCInfo: ClaimInfo | None = said("PersistentVolumeClaim that the volume is copied from.")
    volumeName: str = must("Name of the volume.")
