"""Models of a VM's desired state: its specification, record, name claim and secrets.

The vocabulary is KubeVirt's where KubeVirt has the same concept, in snake_case. So kubebridge only
translates names.
"""

from enum import StrEnum
from operator import not_
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from virtbus.schemas.address_claim import ClaimedAddresses
from virtbus.schemas.cni_config import PluginsDigest
from virtbus.schemas.container import ContainerDisk
from virtbus.schemas.cpu import CORES_MAX as CORES_MAX
from virtbus.schemas.cpu import Cpu as Cpu
from virtbus.schemas.cpu import CpuFeature as CpuFeature
from virtbus.schemas.disk import BOOT_ORDER_MAX, IoThreads
from virtbus.schemas.disk import DISK_MAX as DISK_MAX
from virtbus.schemas.disk import DISK_MIN as DISK_MIN
from virtbus.schemas.disk import DISKS_MAX as DISKS_MAX
from virtbus.schemas.disk import Disk as Disk
from virtbus.schemas.disk import DiskBus as DiskBus
from virtbus.schemas.disk import ErrorPolicy as ErrorPolicy
from virtbus.schemas.dns import DnsConfig
from virtbus.schemas.filesystem import FILESYSTEMS_MAX, Filesystem
from virtbus.schemas.guest_network import GuestNetwork, GuestNetwork6
from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.ignition import Ignition
from virtbus.schemas.image import ImageRef, ImageTarget, sealed_ref
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel, StrictModel
from virtbus.schemas.network import LinkState, Mac, NetworkState
from virtbus.schemas.network_object import NetworkTarget
from virtbus.schemas.nic import (
    ACPI_INDEX_MAX,
    ADDRESSES_MAX,
    MTU_MAX,
    MTU_MIN,
    NICS_MAX,
    QUEUES_MAX,
    NicBinding,
    NicLimits,
    StaticAddress,
)
from virtbus.schemas.nic import NicModel as NicModel
from virtbus.schemas.publish import GUEST_PORTS_MAX, PUBLISHED_MAX, GuestPort, PublishedPort
from virtbus.schemas.quantity import Bytes, Count, format_bytes
from virtbus.schemas.resources import Resources
from virtbus.schemas.seed import (
    CloudInit,
    CloudInitConfigDrive,
    CloudInitNoCloud,
    FilesVolume,
    SysprepVolume,
)
from virtbus.schemas.snapshot import Origin
from virtbus.schemas.strategies import EvictionStrategy as EvictionStrategy
from virtbus.schemas.strategies import RunStrategy as RunStrategy
from virtbus.schemas.volume_ref import HostDevice, HostDisk, NamedVolume, VolumeRef
from virtbus.schemas.watchdog import Watchdog

MIB = 1024**2
MEMORY_MIN, MEMORY_MAX = 16 * MIB, 16 * 1024**4
LabelKey = Annotated[
    str, StringConstraints(max_length=253, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?$")
]
LabelValue = Annotated[
    str, StringConstraints(pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$")
]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=64)]
Annotations = Annotated[dict[str, str], Field(max_length=64)]


class Memory(StrictModel):
    """The guest's memory."""

    guest: Bytes = Field(256 * MIB, ge=MEMORY_MIN, le=MEMORY_MAX)


class Interface(StrictModel):
    """A network device, attached to the network of the same name."""

    name: Id
    mac_address: Mac | None = None
    model: NicModel = NicModel.VIRTIO
    boot_order: Count | None = Field(None, ge=1, le=BOOT_ORDER_MAX, exclude_if=not_)
    """The position in the boot order of disks and interfaces. If None, the guest does not boot from
    the interface."""
    acpi_index: Count | None = Field(None, ge=1, le=ACPI_INDEX_MAX)
    """Linux names the device `eno<index>`."""
    mtu: Count | None = Field(None, ge=MTU_MIN, le=MTU_MAX)
    """None means the network's MTU. An MTU above the network's is refused."""
    queues: Count | None = Field(None, ge=1, le=QUEUES_MAX)
    """The number of queues of a virtio device. None means one queue."""
    state: LinkState | None = None
    """None means that the link is up. A link that is down passes no frame."""
    limits: NicLimits | None = None
    addresses: tuple[StaticAddress, ...] = Field((), max_length=ADDRESSES_MAX)
    """Addresses in the network's subnets. For an IP version without an address here, the network
    chooses one."""
    publish: tuple[PublishedPort, ...] = Field((), max_length=PUBLISHED_MAX)
    """Ports of the VM's host that lead to the guest, on networks to which the host forwards."""
    binding: NicBinding | None = Field(None, exclude_if=not_)
    """None means the binding bridge. At most one interface of a VM can have masquerade."""
    ports: tuple[GuestPort, ...] = Field((), max_length=GUEST_PORTS_MAX, exclude_if=not_)
    """With the binding masquerade or passt, the guest's ports that others can connect to. Empty
    means all ports."""
    vm_network_cidr: GuestNetwork | None = Field(None, exclude_if=not_)
    """With the binding masquerade, the guest's network. Its first address is the gateway's, its
    second the guest's. None means 10.0.2.0/24."""
    vm_ipv6_network_cidr: GuestNetwork6 | None = Field(None, exclude_if=not_)
    """As `vm_network_cidr`, for IPv6. None means fd10:0:2::/120."""


class Devices(StrictModel):
    """The guest's devices beyond CPU and memory."""

    disks: tuple[Disk, ...] = Field((), max_length=DISKS_MAX)
    interfaces: tuple[Interface, ...] = Field((), max_length=NICS_MAX)
    filesystems: tuple[Filesystem, ...] = Field((), max_length=FILESYSTEMS_MAX)
    autoattach_graphics_device: bool | None = None
    """True adds a VGA display with VNC. The default is no display, because a display costs each
    guest 3 MiB (ADR 0023)."""
    watchdog: Watchdog | None = None


class Firmware(StrictModel):
    """Values that the guest's firmware shows. Several VMs of a host may have the same `uuid`."""

    uuid: Uid | None = None
    serial: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = None


class Domain(StrictModel):
    """The machine as the guest sees it."""

    cpu: Cpu = Cpu.model_construct()
    memory: Memory = Memory.model_construct()
    devices: Devices = Devices.model_construct()
    firmware: Firmware = Firmware.model_construct()
    accelerator: Literal["auto", "kvm", "tcg"] = "auto"
    io_threads: IoThreads | None = None
    resources: Resources | None = Field(None, exclude_if=not_)

    @model_validator(mode="after")
    def _within_memory(self) -> "Domain":
        wanted = self.resources.memory_bytes if self.resources else None
        if wanted is not None and not MEMORY_MIN <= wanted <= self.memory.guest:
            msg = f"resources.memory_bytes must be from {format_bytes(MEMORY_MIN)} to memory.guest"
            raise ValueError(msg)
        return self


class ImageVolume(StrictModel):
    """A private overlay of the image `ref`. `size` may be larger than the image.

    A record has the SHA-256 of a URL's query instead of the query, which may be a signature.
    """

    ref: ImageRef
    size: Bytes | None = Field(None, ge=DISK_MIN, le=DISK_MAX)

    def without_secrets(self) -> "ImageVolume":
        ref = sealed_ref(self.ref)[0]
        return self if ref == self.ref else self.model_copy(update={"ref": ref})


class EmptyDisk(StrictModel):
    """An empty disk that is deleted with the VM."""

    capacity: Bytes = Field(ge=DISK_MIN, le=DISK_MAX)


class Volume(StrictModel):
    """The content of the disk of the same name; exactly one source is set."""

    name: Id
    image: ImageVolume | None = None
    container_disk: ContainerDisk | None = None
    empty_disk: EmptyDisk | None = None
    cloud_init_no_cloud: CloudInitNoCloud | None = None
    cloud_init_config_drive: CloudInitConfigDrive | None = None
    files: FilesVolume | None = None
    sysprep: SysprepVolume | None = None
    volume: NamedVolume | None = None
    host_device: HostDevice | None = None
    host_disk: HostDisk | None = None

    @property
    def file_set(self) -> FilesVolume | None:
        """Return the files of an ISO that is no cloud-init seed, or None."""
        return self.files or self.sysprep

    @property
    def cloud_init(self) -> CloudInit | None:
        return self.cloud_init_no_cloud or self.cloud_init_config_drive

    @property
    def is_iso(self) -> bool:
        """Return True for an ISO disk, which virtbus writes for each start of the guest."""
        return self.cloud_init is not None or self.file_set is not None

    @property
    def image_ref(self) -> str:
        """Return the image that the disk begins with, or an empty string."""
        if self.host_device is not None:
            return self.host_device.image or ""
        source = self.image or self.container_disk
        return source.ref if source is not None else ""


class Network(StrictModel):
    """The network of the interface `name`: `default`, a network object, or a node's conflist.

    An object of the VM's namespace has precedence over an object for all namespaces, which has
    precedence over a conflist.
    """

    name: Id
    network: Id = "default"
    plugins_digest: PluginsDigest | None = Field(None, exclude_if=not_)
    """A digest of CNI plugins (`cni_config`). A VM whose network has other plugins is refused."""


class Overcommit(StrEnum):
    """The overcommit policy of a VM."""

    SHARED = "shared"
    """By default, eight vCPUs may share a host CPU. A stopped VM frees its CPUs and memory."""
    STRICT = "strict"
    """The VM's CPUs and memory are reserved for it from placement to delete, even when stopped."""


class PlacementRules(StrictModel):
    """Constraints on the placement of a VM."""

    overcommit: Overcommit = Overcommit.SHARED


class VmSpec(StrictModel):
    """The specification of a VM."""

    run_strategy: RunStrategy = RunStrategy.ALWAYS
    start_strategy: Literal["Paused"] | None = None
    """With Paused, each start leaves the guest paused before its first instruction, as in
    KubeVirt."""
    domain: Domain = Domain.model_construct()
    volumes: tuple[Volume, ...] = Field((), max_length=DISKS_MAX)
    networks: tuple[Network, ...] = Field((), max_length=NICS_MAX)
    dns_config: DnsConfig | None = Field(None, exclude_if=not_)
    ignition: Ignition | None = None
    """Ignition's configuration, for guests that read it from QEMU's fw_cfg."""
    node_selector: Labels = Field(default_factory=dict)
    termination_grace_s: Count = Field(30, ge=0, le=86_400)
    eviction_strategy: EvictionStrategy | None = None
    protected: bool | None = None
    """If True, a delete is refused until an update clears this field."""
    placement: PlacementRules | None = None
    network_state: NetworkState | None = Field(None, exclude_if=not_)

    @property
    def local_disks(self) -> tuple[str, ...]:
        """Return the VM's own disks that the guest may write to; they exist on its node only."""
        disks = self.domain.devices.disks
        fixed = {one.name for one in disks if one.readonly or one.device == "cdrom"}
        own = (one for one in self.volumes if not (one.host_device or one.host_disk or one.volume))
        return tuple(one.name for one in own if not one.is_iso and one.name not in fixed)


class VmRecord(LenientModel):
    """`$KV.vm.<node>.<uid>`: the desired VM and its assignment. Written by controllers only.

    `epoch` rises with every assignment, `generation` with every change of the spec or its volumes,
    `seed_generation` with each change of first-boot data. `sec_digest` is the hex SHA-256 of the
    secrets in `$KV.sec.<node>.<uid>`.
    """

    schema_version: int = SCHEMA_VERSION
    uid: Uid
    namespace: Id
    name: Id
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    spec: VmSpec
    spec_hash: str
    node: str
    epoch: int = 1
    generation: int = 1
    created_ns: int
    powered: bool = True
    """True if the guest should run: set at creation by the run strategy, then by start and stop."""
    power_epoch: int = 0
    """Rises with every start or stop, so that a start is seen even if the VM stopped by itself."""
    stop_grace_s: int | None = None
    restart_epoch: int = 0
    """The power epoch of the last restart. The agent ends a guest with an earlier power epoch."""
    paused: bool = False
    """True if the guest's CPUs should be paused, also in its next run (ADR 0021)."""
    pause_epoch: int = 0
    """Rises with every pause and unpause, and with a start or stop that changes `paused`. An
    unpause also resumes a guest that libvirt paused."""
    requests: tuple[str, ...] = ()
    """Ids of the last requests (not updates) that changed the record. Repeats change nothing."""
    origin: Origin | None = None
    """For a clone: the snapshot that its own disks begin with."""
    deleting: bool = False
    delete_grace_s: int | None = None
    evacuating: bool = False
    """True if the node should end the guest and release the VM. A controller then moves the VM."""
    evacuation_target: str | None = None
    """The requested target node of the evacuation; None: placement decides."""
    reserved: bool = False
    """True: the VM's CPUs and memory are counted in `$KV.vm._reserved.node.<node>`."""
    lease: int = 0
    """The revision of the lease under which a leader task last moved the VM; 0: no move."""
    owner: str = ""
    """The bridge that created the VM, or empty; set by controllers. No other bridge changes it."""
    traceparent: str | None = None
    sec_digest: str | None = None
    seed_generation: int = 0
    volume_refs: dict[str, VolumeRef] = Field(default_factory=dict)
    """The volumes that the VM holds, by their names in specs, until the guest has released them."""
    image_targets: dict[str, ImageTarget] = Field(default_factory=dict)
    """The meanings of image names on the bus at the VM's create, by the plain names in its spec."""
    network_targets: dict[str, NetworkTarget] = Field(default_factory=dict)
    """The network objects that the VM uses, by the names in its spec."""
    address_claims: dict[str, ClaimedAddresses] = Field(default_factory=dict)
    """The addresses that the VM has claimed on the bus, by interface, until the guest has released
    the interface."""
    signature: str = ""
    """The controllers' signature over all other fields; `virtbus.bus.client.signing` adds it."""

    @property
    def ending(self) -> bool:
        """Return True if the VM should leave its node: it is being deleted or evacuated."""
        return self.deleting or self.evacuating

    @property
    def detaching(self) -> dict[str, VolumeRef]:
        """Return the volumes that the VM still holds, and that should leave its guest."""
        if not self.volume_refs:
            return {}
        wanted = {one.name for one in self.spec.volumes}
        return {name: ref for name, ref in self.volume_refs.items() if name not in wanted}

    def image_of(self, volume: Volume) -> str:
        """Return the image of a volume of the spec; empty if the volume has none."""
        ref = self.volume_refs.get(volume.name)
        return ref.image if ref is not None else volume.image_ref

    def target_of(self, volume: Volume) -> ImageTarget | None:
        """Return the target of the volume's image name; None if the bus did not have the name."""
        ref = self.volume_refs.get(volume.name)
        if ref is not None:
            return ref.target
        return self.image_targets.get(volume.image_ref.partition("@")[0])


class Tombstone(LenientModel):
    """`$KV.vm._.<uid>`: prevents the commit of a uid whose name claim was taken over."""

    schema_version: int = SCHEMA_VERSION
    tombstone: Literal[True] = True
    uid: Uid


class NameClaim(LenientModel):
    """`$KV.vm._name.<namespace>.<token>`: the uid that has the name."""

    schema_version: int = SCHEMA_VERSION
    uid: Uid


class JoinNonce(LenientModel):
    """`$KV.vm.<node>._join`: the bus incarnation that the node joined."""

    schema_version: int = SCHEMA_VERSION
    nonce: str


class VmSecrets(LenientModel):
    """`$KV.sec.<node>.<uid>`: secret inputs. Secret inputs of volumes are by volume name."""

    schema_version: int = SCHEMA_VERSION
    uid: Uid
    cloud_init: dict[str, CloudInit] = Field(default_factory=dict)
    files: dict[str, FilesVolume] = Field(default_factory=dict)
    ignition: Ignition | None = None
    image_pull: dict[str, str] = Field(default_factory=dict)
    """Secrets of a pull, by volume name: a registry login (`config.json`) or the query of a URL."""
    replaced: bytes = b""  # the secrets before the last change, see `secrets_in_force`
