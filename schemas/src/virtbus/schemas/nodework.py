"""What the services of one node say to each other (`virtbus.node.<id>.…`)."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from virtbus.schemas.errors import ErrorBody
from virtbus.schemas.image import ImageFormat, ImageInfo, ImageKeys
from virtbus.schemas.model import Fact
from virtbus.schemas.network import InterfaceStatus, NetworkInfo
from virtbus.schemas.node import NodeWish, ServiceState
from virtbus.schemas.quarantine import Keep
from virtbus.schemas.vm import VmRecord


class Ensure(Fact):
    """`rpc.<imaged|netd>.ensure`: make what this record needs; the answer is the ready event.

    `image_pull` are the secrets that the VM brings, by volume, for imaged, which reads none itself:
    logins of container disks, queries of images' URLs.
    """

    record: VmRecord
    image_pull: dict[str, str] = Field(default_factory=dict)


ANY_EPOCH = 2**62
"""In a release: of whatever epoch it is, as long as no record stands for it (audits)."""


class Release(Fact):
    """`rpc.<imaged|netd>.release`: remove all that bears `uid`.

    `epoch` fences an older asker; what is asked for later makes nothing of that epoch again.
    With `keep` imaged moves disks that were written to into the quarantine (ADR 0033).
    """

    uid: str
    epoch: int
    keep: Keep | None = None


class Released(Fact):
    """Nothing that bears `uid` is left (or ever was), but for the quarantine's entry `kept`."""

    uid: str
    kept: str = ""


class GuestCommand(Fact):
    """`rpc.agent.command`: do `verb` on the guest that runs under `epoch`, once for each `id`."""

    uid: str
    epoch: int
    verb: Literal["reset", "soft-reboot"]
    id: str


class Inspect(Fact):
    """`rpc.<service>.inspect`: what the service holds on the host, from the host itself.

    With `mend` netd first makes again what is missing of it.
    """

    uid: str | None = None
    mend: bool = False


class Held(Fact):
    """The uids a service holds something of, and that thing, for audits and orphan sweeps.

    `faults` are what is missing of it by uid, and under the empty one what is wrong with the host's
    own side (netd: bridge, nftables, forwarding).
    """

    things: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    faults: dict[str, tuple[str, ...]] = Field(default_factory=dict)


class MadeDisk(Fact):
    """A disk of a VM, a qcow2 file; `digest` and `image_format` are of its image, if it has one.

    There is no path in it: the agent knows where a VM's disks and images are (ADR 0030).
    """

    virtual_size_bytes: int = Field(ge=0)
    digest: str = Field("", pattern=r"^(sha256:[0-9a-f]{64})?$")
    image_format: ImageFormat | None = None


class ImageReady(Fact):
    """`ready.<uid>.image`: every disk of the VM exists, or why not. `disks` by volume name."""

    uid: str
    epoch: int
    generation: int = 1
    disks: dict[str, MadeDisk] = Field(default_factory=dict)
    digest: str = ""
    error: ErrorBody | None = None


class NetPhase(StrEnum):
    """How far a VM's network is."""

    BEGUN = "begun"
    """MACs are settled and the wrapper may wait for its fds; addresses are not known yet."""
    READY = "ready"
    FAILED = "failed"


class NetReady(Fact):
    """`ready.<uid>.net`: interfaces in the order of the spec, or why not."""

    uid: str
    epoch: int
    generation: int = 1
    phase: NetPhase
    interfaces: tuple[InterfaceStatus, ...] = ()
    error: ErrorBody | None = None


class Tele(Fact):
    """`tele.<service>`: every 4 s and at each change; the nodeagent tells controllers of it."""

    service: str
    state: ServiceState
    image_keys: ImageKeys = ()
    networks: tuple[NetworkInfo, ...] = ()
    quarantined: int = 0
    quarantined_bytes: int = 0
    addresses: tuple[str, ...] = ()
    """The host's own, as netd sees them."""


class ListImages(Fact):
    """`rpc.imaged.list`: a page of the images, by digest, behind the digest `after`."""

    after: str = ""


class HeldImages(Fact):
    """A page of a node's images; `next` is the `after` of the next one, empty at the end."""

    images: tuple[ImageInfo, ...] = ()
    next: str = ""


class PullImage(Fact):
    """`rpc.imaged.pull`: fetch into the store. `job` names the progress subject (a UUID)."""

    ref: str
    job: str


class ForgetImage(Fact):
    """`rpc.imaged.delete`: let go of every name that `ref` (name, URL or digest) stands for."""

    ref: str


class ForgottenImage(Fact):
    """What that let go of. An image that disks are made of stays until the last is deleted."""

    names: tuple[str, ...] = ()
    freed_bytes: int = 0
    used_by: tuple[str, ...] = ()
    """The VMs (uids) whose disks still read the image."""


class ArmNic(Fact):
    """`-device` of one interface: QEMU's properties, `driver` first, without `netdev` and `mac`."""

    device: dict[str, str]
    mac: str


class Arm(Fact):
    """Admin socket of netd: allow the wrapper of (uid, epoch) to fetch its tap fds once, in 30 s.

    `domain_id_hint` is the libvirt domain name whose cgroup the peer must be in.
    """

    uid: str
    epoch: int
    domain_name: str
    nics: tuple[ArmNic, ...] = ()
    traceparent: str | None = None


class Armed(Fact):
    """netd's answer: armed, or why the start must not happen now."""

    uid: str
    error: ErrorBody | None = None


class RecordsRead(Fact):
    """`rpc.agent.records`: what this host knows of its VMs, so that a lost bus is made anew.

    Pages of at most `limit` records, those with a uid above `after`.
    """

    after: str = ""
    limit: int = Field(100, ge=1, le=500)


class KnownRecords(Fact):
    """One page. `removed` (in the first page): uids that left this host of late, with their epoch.

    `wish`: what the bus that the node had joined wanted of it, None where that was nothing.
    `nonce` is the bus incarnation that the node joined; `more` when a further page follows.
    """

    node: str
    nonce: str = ""
    wish: NodeWish | None = None
    records: tuple[VmRecord, ...] = ()
    removed: dict[str, int] = Field(default_factory=dict)
    more: bool = False


class JoinBus(Fact):
    """`rpc.agent.join`: take this bus, whose nonce is given, as the node's own from now on."""

    nonce: str


class JoinedBus(Fact):
    """The node follows the bus that it was told of; `vms` actors go on."""

    node: str
    nonce: str
    vms: int = 0


class Finding(Fact):
    """Something on a host or the bus that no record of a VM accounts for, or that is missing.

    `kind` is domain, network, disk, file, status, record, service, bus or fault; `repair` says what
    `--repair` does about it, empty where it does nothing; `repaired` that it is gone.
    """

    kind: str
    uid: str = ""
    what: str
    repair: str = ""
    repaired: bool = False


class Audit(Fact):
    """`rpc.agent.audit`: compare the host with the records; `repair` removes what is left over.

    `statuses` are the uids of which the bus has a status of this node and no record.
    """

    repair: bool = False
    statuses: tuple[str, ...] = ()


class Audited(Fact):
    """What an audit found; empty when all is well."""

    findings: tuple[Finding, ...] = ()
