"""Defines the model of a VirtualMachineInstance: one run of a guest."""

from typing import Any, Literal

from virtbus.documents.crds.models.devices import Devices
from virtbus.documents.crds.models.instance_status import InstanceStatus
from virtbus.documents.crds.models.machine import (
    Chassis,
    Clock,
    Cpu,
    Features,
    Firmware,
    IoThreads,
    LaunchSecurity,
    Machine,
    Memory,
)
from virtbus.documents.crds.models.part import Int64, Part, must, said
from virtbus.documents.crds.models.pods import (
    ATOMIC,
    Affinity,
    DnsConfig,
    Probe,
    ResourceClaim,
    ResourceList,
    Toleration,
    TopologySpreadConstraint,
)
from virtbus.documents.crds.models.volumes import (
    AccessCredential,
    Network,
    UtilityVolume,
    Volume,
)


def by(*keys: str) -> dict[str, Any]:
    """Return the schema keywords of a list in which `keys` identify the items."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


class Domain(Part):
    """The machine that the guest sees."""

    chassis: Chassis | None = said("Chassis information in SMBIOS.")
    clock: Clock | None = said("Clock and timers of the guest.")
    cpu: Cpu | None = said("Number and model of the guest's CPUs.")
    devices: Devices = must("Devices of the guest, such as disks and network interfaces.")
    features: Features | None = said("Features of the hypervisor that the guest can use.")
    firmware: Firmware | None = said("Firmware of the machine, and its UUID.")
    ioThreads: IoThreads | None = said("Settings of I/O threads.")
    ioThreadsPolicy: str | None = said(
        "Assignment of disks to I/O threads: shared, auto or supplementalPool."
    )
    launchSecurity: LaunchSecurity | None = said(
        "Encrypted guest memory that the host cannot read."
    )
    machine: Machine | None = said("Machine type.")
    memory: Memory | None = said("Memory of the guest.")
    rebootPolicy: Literal["Reboot", "Terminate"] | None = said("Reaction to a reboot by the guest.")
    resources: ResourceList | None = said("Requests and limits of CPU and memory.")


class InstanceSpec(Part):
    """The specification of a VirtualMachineInstance."""

    accessCredentials: list[AccessCredential] | None = said(
        "SSH keys and passwords for logging in to the guest.", max_length=256, **ATOMIC
    )
    affinity: Affinity | None = said("Rules for the placement.")
    architecture: str | None = said(
        "CPU architecture: amd64, arm64 or s390x. The default is the cluster's."
    )
    dnsConfig: DnsConfig | None = said("DNS settings in addition to those of dnsPolicy.")
    dnsPolicy: str | None = said("DNS policy: ClusterFirst (the default), Default or None.")
    domain: Domain = must("Machine that the guest sees.")
    evictionStrategy: str | None = said(
        "Reaction to an eviction: None, LiveMigrate, LiveMigrateIfPossible or External."
    )
    hostname: str | None = said("Host name of the guest. The default is the name of the object.")
    livenessProbe: Probe | None = said("Check of the guest. If it fails, the guest is stopped.")
    networks: list[Network] | None = said("Networks of the guest's interfaces.", max_length=256)
    nodeSelector: dict[str, str] | None = said("Labels that the node must have.")
    priorityClassName: str | None = said("Name of the PriorityClass.")
    readinessProbe: Probe | None = said("Check of the guest. If it fails, the guest is not Ready.")
    resourceClaims: list[ResourceClaim] | None = said("Claims on devices.", **by("name"))
    schedulerName: str | None = said("Name of the scheduler that chooses the node.")
    serviceAccountName: str | None = said("Service account of the launcher pod.")
    startStrategy: str | None = said("Paused starts the guest in the paused state.")
    subdomain: str | None = said(
        "Subdomain of the guest. Its full name is hostname.subdomain.namespace.svc."
    )
    terminationGracePeriodSeconds: Int64 | None = said(
        "Seconds that the guest has for its shutdown. 0 stops it at once."
    )
    tolerations: list[Toleration] | None = said("Node taints that are tolerated.")
    topologySpreadConstraints: list[TopologySpreadConstraint] | None = said(
        "Rules for an even spread over topology domains.", **by("topologyKey", "whenUnsatisfiable")
    )
    utilityVolumes: list[UtilityVolume] | None = said(
        "Volumes that the launcher uses and the guest does not see.", max_length=256, **by("name")
    )
    volumes: list[Volume] | None = said("Content of the guest's disks.", max_length=256)


class VirtualMachineInstance(Part):
    """One run of a guest, from its start to its end."""

    spec: InstanceSpec = must("Specification of the VirtualMachineInstance.")
    status: InstanceStatus | None = said("Observed state. virtbus writes it.")
