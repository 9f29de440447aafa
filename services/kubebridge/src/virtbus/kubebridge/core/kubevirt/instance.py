"""A VirtualMachineInstance: one run of a guest."""

from typing import Any, Literal

from virtbus.kubebridge.core.kubevirt.devices import Devices
from virtbus.kubebridge.core.kubevirt.instance_status import InstanceStatus
from virtbus.kubebridge.core.kubevirt.machine import (
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
from virtbus.kubebridge.core.kubevirt.part import Int64, Part, must, said
from virtbus.kubebridge.core.kubevirt.pods import (
    ATOMIC,
    Affinity,
    DnsConfig,
    Probe,
    ResourceClaim,
    ResourceList,
    Toleration,
    TopologySpreadConstraint,
)
from virtbus.kubebridge.core.kubevirt.volumes import (
    AccessCredential,
    Network,
    UtilityVolume,
    Volume,
)


def by(*keys: str) -> dict[str, Any]:
    """A list of which each item has another key."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


class Domain(Part):
    """The machine that the guest sees."""

    chassis: Chassis | None = said("The chassis, as SMBIOS tells the guest.")
    clock: Clock | None = said("The guest's clock and timers.")
    cpu: Cpu | None = said("How many CPUs the guest has, and which.")
    devices: Devices = must("Disks, network interfaces, and the rest.")
    features: Features | None = said("What the hypervisor offers the guest.")
    firmware: Firmware | None = said("What starts the machine, and its UUID.")
    ioThreads: IoThreads | None = said("How many threads disks have.")
    ioThreadsPolicy: str | None = said("How disks share threads: shared, auto, supplementalPool.")
    launchSecurity: LaunchSecurity | None = said("A guest whose memory its host cannot read.")
    machine: Machine | None = said("The machine's type.")
    memory: Memory | None = said("The guest's memory.")
    rebootPolicy: Literal["Reboot", "Terminate"] | None = said("What a reboot by the guest does.")
    resources: ResourceList | None = said("CPU and memory that the host keeps for it.")


class InstanceSpec(Part):
    """What a guest is, where it may run and how it is ended."""

    accessCredentials: list[AccessCredential] | None = said(
        "Keys and passwords for the guest.", max_length=256, **ATOMIC
    )
    affinity: Affinity | None = said("Where it wants to run.")
    architecture: str | None = said("amd64, arm64 or s390x; by default the cluster's.")
    dnsConfig: DnsConfig | None = said("More of DNS.")
    dnsPolicy: str | None = said("ClusterFirst (the default), Default or None.")
    domain: Domain = must("The machine that the guest sees.")
    evictionStrategy: str | None = said("None, LiveMigrate, LiveMigrateIfPossible or External.")
    hostname: str | None = said("The guest's name; by default the object's.")
    livenessProbe: Probe | None = said("A guest that fails it is ended.")
    networks: list[Network] | None = said("What its interfaces join.", max_length=256)
    nodeSelector: dict[str, str] | None = said("Labels that its node must have.")
    priorityClassName: str | None = said("How much it matters.")
    readinessProbe: Probe | None = said("A guest that fails it is not Ready.")
    resourceClaims: list[ResourceClaim] | None = said("Claims on devices.", **by("name"))
    schedulerName: str | None = said("Who chooses the node.")
    serviceAccountName: str | None = said("Whose rights its pod has.")
    startStrategy: str | None = said("Paused: it starts paused.")
    subdomain: str | None = said("Its full name is hostname.subdomain.namespace.svc.")
    terminationGracePeriodSeconds: Int64 | None = said("Seconds for it to shut down; 0: none.")
    tolerations: list[Toleration] | None = said("Taints of nodes that do not matter.")
    topologySpreadConstraints: list[TopologySpreadConstraint] | None = said(
        "How evenly VMs are spread.", **by("topologyKey", "whenUnsatisfiable")
    )
    utilityVolumes: list[UtilityVolume] | None = said(
        "Claims for the machine, not the guest.", max_length=256, **by("name")
    )
    volumes: list[Volume] | None = said("What fills its disks.", max_length=256)


class VirtualMachineInstance(Part):
    """One run of a guest, from its start to its end."""

    spec: InstanceSpec = must("What it is.")
    status: InstanceStatus | None = said("How it is; written by virtbus.")
