"""Messages between the services of one node (`virtbus.node.<id>.…`)."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from virtbus.schemas.errors import ErrorBody
from virtbus.schemas.image import ImageFormat, ImageInfo, ImageKeys
from virtbus.schemas.model import LenientModel
from virtbus.schemas.network import InterfaceStatus, NetworkInfo
from virtbus.schemas.node import NodeSpec, ServiceState
from virtbus.schemas.quarantine import QuarantineRequest
from virtbus.schemas.vm import VmRecord


class Ensure(LenientModel):
    """`rpc.<imaged|netd>.ensure`: make everything this record needs; the answer is the ready event.

    `image_pull` are the secrets that the VM brings, by volume, for imaged, which reads none itself:
    logins of container disks, queries of images' URLs.
    """

    record: VmRecord
    image_pull: dict[str, str] = Field(default_factory=dict)


ANY_EPOCH = 2**62
"""In a release: any epoch, if no record of the VM exists (audits)."""


class Release(LenientModel):
    """`rpc.<imaged|netd>.release`: remove everything of `uid`.

    `epoch` fences late requests: after the release, nothing is made for that epoch again. With
    `keep` imaged moves written disks into the quarantine (ADR 0033).
    """

    uid: str
    epoch: int
    keep: QuarantineRequest | None = None


class ReleaseReply(LenientModel):
    """Nothing of `uid` is left, except the quarantine's entry `kept`."""

    uid: str
    kept: str = ""


class GuestCommand(LenientModel):
    """`rpc.agent.command`: run `verb` on the guest that runs under `epoch`, once for each `id`."""

    uid: str
    epoch: int
    verb: Literal["reset", "soft-reboot"]
    id: str


class Inspect(LenientModel):
    """`rpc.<service>.inspect`: list the resources that the service finds on the host.

    With `mend` netd first repairs missing resources.
    """

    uid: str | None = None
    mend: bool = False


class HeldResources(LenientModel):
    """The uids that a service has resources of, and those resources, for audits and orphan sweeps.

    `faults` are missing resources by uid. The empty uid stands for the host's own resources (netd:
    bridge, nftables, forwarding).
    """

    things: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    faults: dict[str, tuple[str, ...]] = Field(default_factory=dict)


class MadeDisk(LenientModel):
    """A disk of a VM, a qcow2 file; `digest` and `image_format` are of its image, if it has one.

    It contains no path: the agent derives the paths of disks and images (ADR 0030).
    """

    virtual_size_bytes: int = Field(ge=0)
    digest: str = Field("", pattern=r"^(sha256:[0-9a-f]{64})?$")
    image_format: ImageFormat | None = None


class ImageReady(LenientModel):
    """`ready.<uid>.image`: every disk of the VM exists, or an error. `disks` by volume name."""

    uid: str
    epoch: int
    generation: int = 1
    disks: dict[str, MadeDisk] = Field(default_factory=dict)
    digest: str = ""
    error: ErrorBody | None = None


class NetPhase(StrEnum):
    """The progress of a VM's network."""

    BEGUN = "begun"
    """MACs are known and the wrapper may wait for its descriptors; addresses are not known yet."""
    READY = "ready"
    FAILED = "failed"


class NetReady(LenientModel):
    """`ready.<uid>.net`: interfaces in the order of the spec, or an error."""

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
    quarantined: int = 0
    quarantined_bytes: int = 0
    addresses: tuple[str, ...] = ()
    """The host's own addresses, as netd sees them."""


class ListImages(LenientModel):
    """`rpc.imaged.list`: a page of the images in order of digest, after the digest `after`."""

    after: str = ""


class HeldImages(LenientModel):
    """A page of a node's images; `next` is the `after` of the next page, empty on the last."""

    images: tuple[ImageInfo, ...] = ()
    next: str = ""


class PullImage(LenientModel):
    """`rpc.imaged.pull`: fetch into the store. `job` names the progress subject (a UUID)."""

    ref: str
    job: str


class ForgetImage(LenientModel):
    """`rpc.imaged.delete`: remove every name of the image that `ref` denotes.

    `ref` is a name, a URL or a digest.
    """

    ref: str


class ForgottenImage(LenientModel):
    """The removed names. An image in use by disks stays until the last of them is deleted."""

    names: tuple[str, ...] = ()
    freed_bytes: int = 0
    used_by: tuple[str, ...] = ()
    """The VMs (uids) whose disks still read the image."""


class ArmNic(LenientModel):
    """`-device` of one interface: QEMU's properties, `driver` first, without `netdev` and `mac`."""

    device: dict[str, str]
    mac: str


class Arm(LenientModel):
    """Admin socket of netd: the wrapper of (uid, epoch) may fetch its tap fds once, in 30 s.

    `domain_name` is the libvirt domain name whose cgroup the peer must be in.
    """

    uid: str
    epoch: int
    domain_name: str
    nics: tuple[ArmNic, ...] = ()
    traceparent: str | None = None


class Armed(LenientModel):
    """netd's answer: armed, or why the start must not happen now."""

    uid: str
    error: ErrorBody | None = None


class RecordsRead(LenientModel):
    """`rpc.agent.records`: a host's copies of its VMs' records, to rebuild a lost bus.

    Pages of at most `limit` records, those with a uid above `after`.
    """

    after: str = ""
    limit: int = Field(100, ge=1, le=500)


class KnownRecords(LenientModel):
    """One page. `removed` (first page only): uids that left this host recently, with their epoch.

    `node_spec` is the node's desired state on the bus that it had joined, or None. `nonce` is the
    bus incarnation that the node joined. `more` is set if another page follows.
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
    """The node belongs to the given bus now; `vms` actors resumed."""

    node: str
    nonce: str
    vms: int = 0


class AuditFinding(LenientModel):
    """Something on a host or the bus that no record of a VM accounts for, or that is missing.

    `kind` is domain, network, disk, file, status, record, service, bus or fault. `repair` says what
    `--repair` does, empty if it does nothing. `repaired`: the finding is gone.
    """

    kind: str
    uid: str = ""
    what: str
    repair: str = ""
    repaired: bool = False


class Audit(LenientModel):
    """`rpc.agent.audit`: compare the host with the records; `repair` removes orphans.

    `statuses` are the uids with a status of this node and without a record.
    """

    repair: bool = False
    statuses: tuple[str, ...] = ()


class Audited(LenientModel):
    """The findings of an audit; empty if all is well."""

    findings: tuple[AuditFinding, ...] = ()
