"""Requests to the services of a node, and their events (`virtbus.node.<id>.…`)."""

from enum import StrEnum
from operator import not_
from typing import Annotated, Literal

from pydantic import Field

from virtbus.schemas.errors import ErrorBody
from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.image import ImageFormat, ImageInfo, ImageKeys, ImageTarget
from virtbus.schemas.layer import LAYER_NAME
from virtbus.schemas.model import LenientModel
from virtbus.schemas.network import InterfaceStatus, NetworkInfo
from virtbus.schemas.node import NodeSpec, ServiceState
from virtbus.schemas.operation import ExportFormat, ExportResult
from virtbus.schemas.overlay import TunnelEnd
from virtbus.schemas.pool import PoolReport
from virtbus.schemas.quarantine import QuarantineRequest
from virtbus.schemas.snapshot import SnapshotRef
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume_ref import FillSource, VolumeRef


class Ensure(LenientModel):
    """`rpc.<imaged|netd>.ensure`: make the VM's disks or network; the answer is the ready event.

    `image_pull` are the VM's own secrets for pulls, by volume: logins of container disks, and
    queries of image URLs. imaged gets these secrets in the request because it does not read
    `$KV.sec`.
    """

    record: VmRecord
    image_pull: dict[str, str] = Field(default_factory=dict)


ANY_EPOCH = 2**62
"""The epoch in a release of a VM without a record (audits). This epoch covers every other epoch."""


class Release(LenientModel):
    """`rpc.<imaged|netd>.release`: remove everything of `uid`.

    After the release, the service makes nothing for `epoch` or a lower epoch, so that late requests
    have no effect. With `keep`, imaged moves written disks into the quarantine (ADR 0033). With
    `forced`, netd gives up on a CNI plugin that has failed three times, and leaves its results.
    """

    uid: str
    epoch: int
    forced: bool = False
    keep: QuarantineRequest | None = None


class ReleaseReply(LenientModel):
    """Nothing of `uid` is left on the host. `kept` is its entry in the quarantine, or empty."""

    uid: str
    kept: str = ""


class VolumeRelease(LenientModel):
    """`rpc.imaged.volume-release`: remove the data of a volume that no VM holds.

    With `made_by`, complete data is removed only if the fill `made_by` made the data and no VM has
    used it since. With `kept`, data is removed only if the node has the content of the volume
    `kept`.
    """

    ref: VolumeRef
    made_by: Uid | None = None
    kept: VolumeRef | None = None


class VolumeReleased(LenientModel):
    """Nothing of the volume is left. `found` is True if there was something to remove."""

    found: bool = False


class ExportWork(LenientModel):
    """`rpc.imaged.export`: ensure the exported file of operation `id`, or end the export.

    A cancel comes too late for a file that is published; `remove` removes the file. The disk is the
    volume `ref`; without `ref`, the disk is `disk` of the VM `uid`. imaged derives all paths. No
    guest may use the disk during the export.
    """

    id: Uid
    do: Literal["ensure", "cancel", "remove"] = "ensure"
    uid: Uid
    disk: Id | None = None
    ref: VolumeRef | None = None
    format: ExportFormat = ExportFormat.QCOW2


class FillWork(LenientModel):
    """`rpc.imaged.fill`: write the content of the volume `ref` as operation `id`, or cancel it.

    imaged never writes to a volume that has content. Once the volume has content, a cancel comes
    too late.
    """

    id: Uid
    do: Literal["ensure", "cancel"] = "ensure"
    ref: VolumeRef
    source: FillSource


class WorkState(LenientModel):
    """The progress of an operation. After a cancel, `done` means that the cancel came too late.

    Only an export has a `result`, and only a fill has `virtual_size_bytes`.
    """

    state: Literal["none", "working", "done"]
    step: str = ""
    done_bytes: int = Field(0, ge=0)
    total_bytes: int = Field(0, ge=0)
    result: ExportResult | None = None
    virtual_size_bytes: int = Field(0, ge=0)
    """The size of the disk that a fill has made."""
    message: str = ""
    """A remark about the result."""
    parent: str = ""
    """The bitmap from which QEMU writes an increment; empty for a full backup."""


class GuestCommand(LenientModel):
    """`rpc.agent.command`: run `verb` on the guest of `epoch`, once for each request `id`."""

    uid: str
    epoch: int
    verb: Literal["reset", "soft-reboot"]
    id: str


class GuestFreeze(LenientModel):
    """`rpc.agent.freeze`: freeze the guest of `epoch` for `timeout_s`; 0 thaws it."""

    uid: str
    epoch: int
    timeout_s: int = Field(ge=0, le=3600)


class Inspect(LenientModel):
    """`rpc.<service>.inspect`: list the resources that the service finds on the host.

    With `mend`, netd first repairs missing resources. With `volumes_after`, imaged lists only
    volumes whose folder's name is greater. `snapshots_after` does the same for snapshots.
    """

    uid: str | None = None
    mend: bool = False
    volumes_after: str | None = None
    snapshots_after: str | None = None


class HeldVolume(LenientModel):
    """The data of a volume on a host. `ref` is the host's copy of its reference, if readable.

    `holder` is the last VM whose disks were made with the volume.
    """

    folder: str
    ref: VolumeRef | None = None
    holder: str = ""


class HeldSnapshot(LenientModel):
    """The data of a snapshot on a host. A complete snapshot has the fields after `folder`."""

    folder: str
    ref: SnapshotRef | None = None
    resource: Literal["vm", "volume"] = "vm"
    uid: str = ""
    name: str = ""
    size_bytes: int = 0


class HeldResources(LenientModel):
    """A service's resources on the host, by uid, for audits and orphan sweeps.

    `faults` are missing resources by uid. The empty uid stands for the host's own resources (netd:
    Linux bridge, nftables, forwarding). `more` is set if another page follows. `unread_pools` are
    the pools whose volumes the list lacks, because they do not answer.
    """

    things: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    faults: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    volumes: tuple[HeldVolume, ...] = ()
    snapshots: tuple[HeldSnapshot, ...] = ()
    more: bool = False
    unread_pools: tuple[str, ...] = ()


class MadeDisk(LenientModel):
    """A disk of a VM. `digest` and `image_format` describe its image, if it has one.

    There is no field for a path: the agent derives the paths of disks and images (ADR 0030).
    """

    virtual_size_bytes: int = Field(ge=0)
    digest: str = Field("", pattern=r"^(sha256:[0-9a-f]{64})?$")
    image_format: ImageFormat | None = None
    layers: tuple[Annotated[str, Field(pattern=LAYER_NAME)], ...] = Field((), max_length=64)
    """The file names of the layers between the disk and its image, from the top (ADR 0061)."""


class ImageReady(LenientModel):
    """`ready.<uid>.image`: every disk of the VM exists, or `error`. `disks` is by volume name."""

    uid: str
    epoch: int
    generation: int = 1
    disks: dict[str, MadeDisk] = Field(default_factory=dict)
    digest: str = ""
    error: ErrorBody | None = None


class NetPhase(StrEnum):
    """The progress of a VM's network."""

    BEGUN = "begun"
    """MACs are known, addresses are not yet. vmwrapper may already wait for its descriptors."""
    READY = "ready"
    FAILED = "failed"


class NetReady(LenientModel):
    """`ready.<uid>.net`: interfaces in the order of the spec, or `error`."""

    uid: str
    epoch: int
    generation: int = 1
    phase: NetPhase
    interfaces: tuple[InterfaceStatus, ...] = ()
    error: ErrorBody | None = None


class ServiceReport(LenientModel):
    """`report.<service>`: sent every 4 s and on change; the agent forwards it to controllers."""

    service: str
    state: ServiceState
    image_keys: ImageKeys = ()
    networks: tuple[NetworkInfo, ...] = ()
    cni_plugins: tuple[str, ...] = ()
    """CNI plugins that the conflist in a network object may run."""
    links: dict[str, str] = Field(default_factory=dict)
    link_mtus: dict[str, int] = Field(default_factory=dict, exclude_if=not_)
    tunnel: TunnelEnd | None = None
    bindings: tuple[str, ...] = ()
    """Bindings that need a program, if the host has the program."""
    quarantined: int = 0
    quarantined_bytes: int = 0
    image_bytes: int = 0
    image_quota_bytes: int = 0
    addresses: tuple[str, ...] = ()
    """The host's own addresses, as netd sees them."""
    pools: tuple[PoolReport, ...] = ()
    """The pools that imaged measures."""


class ListImages(LenientModel):
    """`rpc.imaged.list`: request the page of images, ordered by digest, that follows `after`."""

    after: str = ""


class HeldImages(LenientModel):
    """A page of a node's images; `next` is the `after` of the next page, empty if there is none."""

    images: tuple[ImageInfo, ...] = ()
    next: str = ""


class PullImage(LenientModel):
    """`rpc.imaged.pull`: fetch the image `ref`. `job` is the UUID in the progress subject.

    `target` is the meaning of the name in `ref`, if the bus has the name. `pull_secret` is the
    login for the registry of `ref`, as a `config.json`. The login is never stored.
    """

    ref: str
    job: str
    target: ImageTarget | None = None
    pull_secret: str = Field("", repr=False)


class ForgetImage(LenientModel):
    """`rpc.imaged.delete`: remove every name of the image that `ref` denotes.

    `ref` is a name, a URL or a digest.
    """

    ref: str


class ForgottenImage(LenientModel):
    """The removed names. An image stays until the last disk that uses it is deleted."""

    names: tuple[str, ...] = ()
    freed_bytes: int = 0
    used_by: tuple[str, ...] = ()
    """The VMs (uids) whose disks still read the image."""


class ArmNic(LenientModel):
    """One interface: the properties of QEMU's `-device`, `driver` first.

    `device` has no `netdev` and no `mac`. Numbers and flags have the type that QEMU's JSON needs.
    """

    device: dict[str, str | int | bool]
    mac: str


class Arm(LenientModel):
    """A request on netd's admin socket: vmwrapper of (uid, epoch) may fetch its tap descriptors.

    vmwrapper may fetch them once, within 30 s. `domain_name` is the libvirt domain in whose cgroup
    vmwrapper must run.
    """

    uid: str
    epoch: int
    domain_name: str
    nics: tuple[ArmNic, ...] = ()
    traceparent: str | None = None


class Armed(LenientModel):
    """netd's answer to `Arm`. `error` says why the guest must not start now."""

    uid: str
    error: ErrorBody | None = None


class RecordsRead(LenientModel):
    """`rpc.agent.records`: a host's copies of its VMs' records, to rebuild a lost bus.

    The answer is a page of at most `limit` records with a uid above `after`.
    """

    after: str = ""
    limit: int = Field(100, ge=1, le=500)


class KnownRecords(LenientModel):
    """A page of a host's records.

    `removed` (first page only) are the uids that left this host recently, with their epochs.
    `node_spec` is the node's desired state on the bus that the node had joined, or None. `nonce` is
    the incarnation of that bus. `more` is set if another page follows.
    """

    node: str
    nonce: str = ""
    node_spec: NodeSpec | None = None
    records: tuple[VmRecord, ...] = ()
    removed: dict[str, int] = Field(default_factory=dict)
    more: bool = False


class JoinBus(LenientModel):
    """`rpc.agent.join`: accept the bus with this nonce as the node's own."""

    nonce: str


class JoinedBus(LenientModel):
    """The node has joined the given bus; `vms` is the number of actors that resumed."""

    node: str
    nonce: str
    vms: int = 0
